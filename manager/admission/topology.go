package admission

import "fmt"

// Policy is a policy of the Topology Manager.
type Policy string

// The policies, as the kubelet's configuration calls them.
const (
	PolicyNone           Policy = "none"
	PolicyBestEffort     Policy = "best-effort"
	PolicyRestricted     Policy = "restricted"
	PolicySingleNUMANode Policy = "single-numa-node"
)

// Scope is what gets one affinity.
type Scope string

// The scopes, as the kubelet's configuration calls them.
const (
	ScopeContainer Scope = "container"
	ScopePod       Scope = "pod"
)

// Topology is the Topology Manager of a machine: it chooses the NUMA nodes of containers. The zero value has the policy
// none. Its Policy and Scope may be empty, for none and container.
type Topology struct {
	Policy Policy
	Scope  Scope
	// Machine are the machine's NUMA nodes.
	Machine Nodes
}

// Validate returns what is wrong with the policy and the scope, in the kubelet's words.
func (t Topology) Validate() error {
	switch t.Policy {
	case "", PolicyNone, PolicyBestEffort, PolicyRestricted, PolicySingleNUMANode:
	default:
		return fmt.Errorf("unknown policy: %q", t.Policy)
	}
	switch t.Scope {
	case "", ScopeContainer, ScopePod:
	default:
		return fmt.Errorf("unknown scope: %q", t.Scope)
	}
	return nil
}

// Merge returns the affinity of a container or pod, from the hints of each resource that it asks for. It is empty if
// any nodes will do. The error ErrTopologyAffinity means that the policy rejects the pod.
func (t Topology) Merge(resources [][]Hint) (Nodes, error) {
	return 0, nil
}
