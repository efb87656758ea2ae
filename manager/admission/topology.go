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

// Scope says whether each container gets an affinity of its own, or the whole pod gets one.
type Scope string

// The scopes, as the kubelet's configuration calls them.
const (
	ScopeContainer Scope = "container"
	ScopePod       Scope = "pod"
)

// ErrTopologyAffinity means that the policy rejects the pod: the devices cannot be on NUMA nodes that it admits. The
// text is the kubelet's. The reason in the pod's status is TopologyAffinityError.
//
//nolint:staticcheck // it begins with a capital letter
var ErrTopologyAffinity = errors.New("Resources cannot be allocated with Topology locality")

// Topology is the Topology Manager of a machine: it chooses the NUMA nodes of containers. An empty Policy means
// "none", and an empty Scope means "container".
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

// Merge returns the affinity of a container or pod, from the hints of each resource that it requests. An empty
// affinity means that the nodes do not matter. The error ErrTopologyAffinity means that the policy rejects the pod.
//
// The result is the kubelet's. A combination has one hint of each resource; the best combination is the one whose
// hints have the best nodes in common. A combination is preferred if all its hints are preferred and have the same
// nodes, so preferred combinations are found by their nodes. The other combinations matter only to the policy
// best-effort.
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

// sharedPreference returns the smallest set of nodes that is a preferred hint of every resource, or 0. If several sets
// have that size, it returns the one with the lowest node numbers.
func sharedPreference(resources [][]Hint) Nodes {
	shared := map[Nodes]int{} // how many resources prefer the set, counted from the first resource without a gap
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

// compromise returns the best set of nodes that one hint of each resource can have in common, or 0. The best size is
// the number of nodes that the most demanding resource needs. After that come the next smaller sizes, and then the
// next larger ones.
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

// packHints returns a number for each subset of `common`: 1 if the nodes of a hint that are in `common` are exactly
// this subset, and 0 otherwise.
func packHints(hints []Hint, common Nodes) []uint64 {
	sets := make([]uint64, 1<<common.Count())
	for _, h := range hints {
		sets[h.Nodes.pack(common)] = 1
	}
	return sets
}

// intersect changes a: a set gets 1 if it is the intersection of one set in a and one in b, and 0 otherwise. To
// compare all pairs would take the square of the time. Instead, overSupersets sums up the numbers of each set's
// supersets. The product of the two sums is the number of pairs that have at least this set in common. Undoing the
// sums leaves the pairs that have exactly this set in common.
func intersect(a, b []uint64) {
	overSupersets(a, 1)
	overSupersets(b, 1)
	for set := range a {
		a[set] *= b[set]
	}
	overSupersets(a, ^uint64(0)) // -1
	for set := range a {
		a[set] = min(a[set], 1) // otherwise the numbers of combinations would overflow
	}
}

// overSupersets adds the numbers of all supersets to the number of each set. With the sign -1 it undoes this.
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
