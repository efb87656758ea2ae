package admission

import (
	"fmt"
	"math/bits"
)

// maxNodes is the largest number of NUMA nodes that the devices of one resource may be on: there are up to 2^maxNodes
// hints.
const maxNodes = 16

// Hint is a set of NUMA nodes on which a request can be met.
type Hint struct {
	Nodes Nodes
	// Preferred means that no smaller set could meet the request, even if every device were free.
	Preferred bool
}

// Hints returns the sets of the machine's NUMA nodes on which a request can be met. The result is nil if the nodes do
// not matter: the policy is none, no device of the resource has a NUMA node, or nothing is requested. The result is
// empty but not nil if no set can meet the request.
//
// If the request is that of a whole pod, its Count is the pod's Limits, and Reusable is empty.
//
// Hints returns an error if the devices are on too many NUMA nodes.
func (p *Pool) Hints(t Topology, r Request) ([]Hint, error) {
	if t.none() || r.Count <= 0 || p.hasNUMA.count() == 0 {
		return nil, nil
	}
	free, reusable := p.free(r), p.reusable(r)
	if free.count()+reusable.count() < r.Count {
		return []Hint{}, nil
	}
	nodes := p.nodes & t.Machine
	if nodes.Count() > maxNodes {
		return nil, fmt.Errorf("make topology hints for %s: its devices are on %d NUMA nodes, at most %d are supported",
			p.resource, nodes.Count(), maxNodes)
	}
	return p.count(nodes, free, reusable).hints(nodes, int32(min(r.Count, 1<<30))), nil
}

// tally has numbers of devices: those that the plugin lists, those that are free, and those that are reusable.
type tally struct{ listed, free, reusable int32 }

// tallies has, for each set of NUMA nodes, the numbers of devices whose NUMA nodes are all in that set. A set is a
// number: bit i is for the i-th node that has devices.
type tallies []tally

// count fills the tallies. First each set gets the devices on exactly its nodes; then it also gets those of its
// subsets. This takes one addition for each set and node. To test each device against each set would take more.
func (p *Pool) count(nodes Nodes, free, reusable bitset) tallies {
	in := make(tallies, 1<<nodes.Count())
	for i, near := range p.near {
		exactly := &in[near.pack(nodes)]
		exactly.listed++
		if free.has(i) {
			exactly.free++
		}
		if reusable.has(i) {
			exactly.reusable++
		}
	}
	for bit := 1; bit < len(in); bit <<= 1 {
		for first := 0; first < len(in); first += 2 * bit {
			subsets, sets := in[first:first+bit], in[first+bit:first+2*bit]
			for i, subset := range subsets {
				sets[i].listed += subset.listed
				sets[i].free += subset.free
				sets[i].reusable += subset.reusable
			}
		}
	}
	return in
}

// hints returns the sets with enough devices, in ascending order. Devices without NUMA nodes are counted in no set.
// Reusable devices with NUMA nodes are taken first, so a set must contain all of these.
func (in tallies) hints(nodes Nodes, need int32) []Hint {
	all := len(in) - 1
	smallest := nodes.Count()
	for set := 1; set <= all; set++ {
		if in[all].listed-in[all&^set].listed >= need {
			smallest = min(smallest, bits.OnesCount(uint(set)))
		}
	}
	hints := make([]Hint, 0, len(in))
	var subset Nodes
	for set := 1; set <= all; set++ {
		subset = nextSubset(subset, nodes)
		outside := in[all&^set]
		matching := in[all].free - outside.free + in[all].reusable - outside.reusable
		if outside.reusable == in[0].reusable && matching >= need {
			hints = append(hints, Hint{Nodes: subset, Preferred: bits.OnesCount(uint(set)) == smallest})
		}
	}
	return hints
}
