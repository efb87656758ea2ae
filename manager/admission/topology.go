package admission

import (
	"cmp"
	"errors"
	"fmt"
)

// Policy is a policy of the Topology Manager.
type Policy string

// The policies, as the kubelet's configuration calls them.
const (
	PolicyNone           Policy = "none"
	PolicyBestEffort     Policy = "best-effort"
	PolicyRestricted     Policy = "restricted"
	PolicySingleNUMANode Policy = "single-numa-node"
)

// Scope is whether each container or the whole pod gets one affinity.
type Scope string

// The scopes, as the kubelet's configuration calls them.
const (
	ScopeContainer Scope = "container"
	ScopePod       Scope = "pod"
)

// ErrTopologyAffinity is the kubelet's rejection of a pod whose devices cannot be on NUMA nodes that the policy admits.
// The reason in the pod's status is TopologyAffinityError. The text is the kubelet's.
//
//nolint:staticcheck // it begins with a capital letter
var ErrTopologyAffinity = errors.New("Resources cannot be allocated with Topology locality")

// Topology is the Topology Manager of a machine: it chooses the NUMA nodes of containers. An empty Policy means none,
// an empty Scope container.
type Topology struct {
	Policy Policy
	Scope  Scope
	// Machine is the set of the machine's NUMA nodes.
	Machine Nodes
}

// Validate returns the kubelet's error for an unknown policy or scope.
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

func (t Topology) none() bool { return t.Policy == "" || t.Policy == PolicyNone }

// Merge returns the affinity of a container or pod, from the hints of each resource that it requests. An empty affinity
// means that any nodes will do. The error ErrTopologyAffinity means that the policy rejects the pod.
//
// The result is the kubelet's: of all combinations of one hint per resource, the one with the best common nodes. A
// combination is preferred if all its hints are preferred and have the same nodes. Preferred combinations can be found
// by their nodes; the others matter only to the policy best-effort.
func (t Topology) Merge(resources [][]Hint) (Nodes, error) {
	if t.none() {
		return 0, nil
	}
	possible, nodes := true, t.Machine
	var constraints [][]Hint
	for _, hints := range resources {
		if len(hints) > 0 {
			constraints = append(constraints, hints)
		} else if hints != nil {
			possible = false
		}
	}
	single := t.Policy == PolicySingleNUMANode
	if len(constraints) > 0 {
		nodes = sharedPreference(constraints)
		possible = possible && nodes != 0 && (!single || nodes.Count() == 1)
	}
	switch {
	case possible && single && nodes == t.Machine:
		return 0, nil
	case possible:
		return nodes, nil
	case t.Policy != PolicyBestEffort:
		return 0, ErrTopologyAffinity
	case len(constraints) == 0:
		return t.Machine, nil
	}
	return cmp.Or(compromise(constraints), t.Machine), nil
}

// sharedPreference returns the smallest set of nodes that is a preferred hint of every resource, or 0. Of several sets
// of that size it returns the one with the lower node numbers.
func sharedPreference(resources [][]Hint) Nodes {
	shared := map[Nodes]int{} // the number of resources that prefer the set, counted from the first resource on
	for n, hints := range resources {
		for _, h := range hints {
			if h.Preferred && shared[h.Nodes] == n {
				shared[h.Nodes]++
			}
		}
	}
	var best Nodes
	for nodes, n := range shared {
		narrower := cmp.Or(cmp.Compare(nodes.Count(), best.Count()), cmp.Compare(nodes, best)) < 0
		if n == len(resources) && (best == 0 || narrower) {
			best = nodes
		}
	}
	return best
}

// compromise returns the best nodes that one hint per resource can have in common, or 0. The best number of nodes is
// the number that the most demanding resource needs, then the next smaller ones, then the next larger ones.
func compromise(resources [][]Hint) Nodes {
	common, wanted := ^Nodes(0), 0
	for _, hints := range resources {
		union, narrowest := Nodes(0), 64
		for _, h := range hints {
			union |= h.Nodes
			narrowest = min(narrowest, h.Nodes.Count())
		}
		common, wanted = common&union, max(wanted, narrowest)
	}
	possible := packHints(resources[0], common)
	for _, hints := range resources[1:] {
		intersect(possible, packHints(hints, common))
	}
	rank := func(n Nodes) int {
		if n.Count() > wanted {
			return n.Count()
		}
		return wanted - n.Count()
	}
	var best, subset Nodes
	for set := 1; set < len(possible); set++ {
		subset = nextSubset(subset, common)
		if possible[set] != 0 && (best == 0 || rank(subset) < rank(best)) {
			best = subset
		}
	}
	return best
}

// packHints returns, for each subset of common, 1 if a hint has exactly those of the common nodes, else 0.
func packHints(hints []Hint, common Nodes) []uint64 {
	sets := make([]uint64, 1<<common.Count())
	for _, h := range hints {
		sets[h.Nodes.pack(common)] = 1
	}
	return sets
}

// intersect replaces a: each set gets 1 if it is the intersection of one set in a and one in b, else 0. The number of
// pairs that have at least a set in common is the product of two sums over supersets; undoing the sums leaves the pairs
// that have exactly this set in common. Comparing all pairs would cost the square.
func intersect(a, b []uint64) {
	overSupersets(a, 1)
	overSupersets(b, 1)
	for set := range a {
		a[set] *= b[set]
	}
	overSupersets(a, ^uint64(0)) // -1
	for set := range a {
		a[set] = min(a[set], 1) // or the numbers of combinations would overflow
	}
}

// overSupersets adds to each set's number the numbers of all its supersets; with sign -1 it undoes that.
func overSupersets(numbers []uint64, sign uint64) {
	for bit := 1; bit < len(numbers); bit <<= 1 {
		for first := 0; first < len(numbers); first += 2 * bit {
			sets, supersets := numbers[first:first+bit], numbers[first+bit:first+2*bit]
			for i := range sets {
				sets[i] += sign * supersets[i]
			}
		}
	}
}
