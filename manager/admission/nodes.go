package admission

import (
	"math/bits"
	"slices"
)

// Nodes is a set of NUMA nodes: bit n is node n. There are 64 at most, as in the kubelet.
type Nodes uint64

// NodesOf returns the set of the nodes with these IDs. IDs below 0 and above 63 are left out.
func NodesOf(ids ...int) Nodes {
	var n Nodes
	for _, id := range ids {
		if id >= 0 && id < 64 {
			n |= 1 << id
		}
	}
	return n
}

// Count returns the number of nodes in the set.
func (n Nodes) Count() int { return bits.OnesCount64(uint64(n)) }

// IDs returns the nodes' IDs, ascending.
func (n Nodes) IDs() []int {
	return slices.AppendSeq(make([]int, 0, n.Count()), n.each)
}

func (n Nodes) each(yield func(int) bool) {
	for ; n != 0; n &= n - 1 {
		if !yield(bits.TrailingZeros64(uint64(n))) {
			return
		}
	}
}

// pack returns the set n as a number in which bit i is for the i-th member of all.
func (n Nodes) pack(all Nodes) int {
	if all&(all+1) == 0 { // all has the first nodes, as on most machines
		return int(n & all)
	}
	packed := 0
	for i := 0; all != 0; i++ {
		if lowest := all & -all; n&lowest != 0 {
			packed |= 1 << i
		}
		all &= all - 1
	}
	return packed
}

// nextSubset returns the next subset of nodes, in the order of their numbers. Starting from 0, the n-th call returns
// the subset whose packed number is n.
func nextSubset(subset, nodes Nodes) Nodes { return (subset - nodes) & nodes }
