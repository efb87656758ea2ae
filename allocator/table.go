package allocator

import (
	"math/bits"
	"slices"
)

// Nodes of at most tableGPUs GPUs have a table with the score of every set. Sets are bits there.

// fillTable computes the score of every set: that of its lowest GPU with the others, and that of the others.
func (n *Node) fillTable() {
	n.table = make([]int32, 1<<len(n.gpus))
	for x := uint32(1); x < uint32(len(n.table)); x++ {
		rest := x & (x - 1)
		row, sum := n.score[bits.TrailingZeros32(x)], n.table[rest]
		for r := rest; r != 0; r &= r - 1 {
			sum += row[bits.TrailingZeros32(r)]
		}
		n.table[x] = sum
	}
}

// fillNext computes L in Topology for every set: the best pairs, and the best sets of 4 and of 8.
func (n *Node) fillNext() {
	// The lowest GPU of a set is in one of its best pairs, or in none.
	n.next = make([]int32, len(n.table))
	for x := uint32(1); x < uint32(len(n.next)); x++ {
		rest := x & (x - 1)
		row, most := n.score[bits.TrailingZeros32(x)], n.next[rest]
		for r := rest; r != 0; r &= r - 1 {
			most = max(most, row[bits.TrailingZeros32(r)]+n.next[rest&^(r&-r)])
		}
		n.next[x] = most
	}
	best := make([]int32, len(n.table))
	for _, k := range []int{4, 8} {
		for x := range uint32(len(n.table)) {
			switch size := bits.OnesCount32(x); {
			case size < k:
				continue
			case size == k:
				best[x] = n.table[x]
			default: // of any k+1 GPUs the best set lacks one
				most := int32(0)
				for r, i := x, 0; i <= k; i++ {
					most = max(most, best[x&^(r&-r)])
					r &= r - 1
				}
				best[x] = most
			}
			n.next[x] += best[x]
		}
		clear(best)
	}
}

// fillKinds groups the GPUs that have the same score with every other GPU and are on the same NUMA node.
func (n *Node) fillKinds() {
	same := func(a, b int) bool {
		for g := range n.gpus {
			if g != a && g != b && n.score[a][g] != n.score[b][g] {
				return false
			}
		}
		return slices.ContainsFunc(n.numa, func(s set) bool { return s.contains(a) && s.contains(b) })
	}
	for g := range n.gpus {
		i := slices.IndexFunc(n.kinds, func(kind uint32) bool { return same(g, bits.TrailingZeros32(kind)) })
		if i < 0 {
			i = len(n.kinds)
			n.kinds = append(n.kinds, 0)
		}
		n.kinds[i] |= 1 << g
	}
}

// candidate is a set of GPUs with what it is compared by.
type candidate struct {
	gpus  uint32
	nodes int32 // the number of NUMA nodes, if it counts
	score int32
	next  int32 // L of what is left
	left  int32 // the score of what is left
}

// compare is negative if a is better. No two sets are equal.
func (a *candidate) compare(b *candidate) int {
	switch {
	case a.nodes != b.nodes:
		return int(a.nodes - b.nodes)
	case a.score != b.score:
		return int(b.score - a.score)
	case a.next != b.next:
		return int(b.next - a.next)
	case a.left != b.left:
		return int(b.left - a.left)
	case a.gpus == b.gpus:
		return 0
	case before(a.gpus, b.gpus):
		return -1
	default:
		return 1
	}
}

// before reports whether a contains the first GPU that is in only one of the two sets.
func before(a, b uint32) bool {
	differ := a ^ b
	return a&(differ&-differ) != 0
}

// searchTable compares every set: at most 12,870 of 16 GPUs. If nodes are given, fewer of these NUMA nodes come first.
func (n *Node) searchTable(q query, nodes []set, k int) []found {
	available, must := q.available.word(), q.must.word()
	best := make([]candidate, 0, k+1) // in order
	visit := func(x uint32) {
		x |= must
		c := candidate{gpus: x, score: n.table[x]}
		for i := range nodes {
			if nodes[i].word()&x != 0 {
				c.nodes++
			}
		}
		if len(best) == k { // most sets are worse, and that shows before next and left are known
			if worst := &best[k-1]; c.nodes > worst.nodes || c.nodes == worst.nodes && c.score < worst.score {
				return
			}
		}
		rest := available &^ x
		c.next, c.left = n.next[rest], n.table[rest]
		i, _ := slices.BinarySearchFunc(best, c, func(a, b candidate) int { return a.compare(&b) })
		if i < k {
			best = slices.Insert(best, i, c)
			best = best[:min(len(best), k)]
		}
	}
	free, size := q.from.word()&^must, q.size-q.must.len()
	if k == 1 {
		n.eachDistinct(free, size, visit)
	} else {
		eachSubset(free, size, visit)
	}
	all := make([]found, len(best))
	for i, c := range best {
		all[i] = found{set: set{uint64(c.gpus)}, score: int(c.score), exact: true}
	}
	return all
}

// eachDistinct visits the subsets of a size that can be the best: of GPUs that can be exchanged, the first come first.
// On real machines these are few of all subsets.
func (n *Node) eachDistinct(free uint32, size int, visit func(uint32)) {
	var kinds []uint32
	for _, kind := range n.kinds {
		if kind &= free; kind != 0 {
			kinds = append(kinds, kind)
		}
	}
	if len(kinds) == bits.OnesCount32(free) {
		eachSubset(free, size, visit)
		return
	}
	var choose func(kinds []uint32, x, free uint32, size int)
	choose = func(kinds []uint32, x, free uint32, size int) {
		if size == 0 {
			visit(x)
			return
		}
		free &^= kinds[0]
		for kind := kinds[0]; ; kind &= kind - 1 {
			if size <= bits.OnesCount32(free) {
				choose(kinds[1:], x, free, size)
			}
			if kind == 0 || size == 0 {
				return
			}
			x |= kind & -kind
			size--
		}
	}
	if size <= bits.OnesCount32(free) {
		choose(kinds, 0, free, size)
	}
}

// eachSubset visits the subsets of a size. It is Gosper's hack (HAKMEM 175) on the bits of free. The bits between them
// are set for the addition, so that its carry passes over them.
func eachSubset(free uint32, size int, visit func(uint32)) {
	var lowest [33]uint32 // lowest[i] has the lowest i bits of free
	total := 0
	for r := free; r != 0; r &= r - 1 {
		lowest[total+1] = lowest[total] | r&-r
		total++
	}
	if size < 0 || size > total {
		return
	}
	x, last := lowest[size], free&^lowest[total-size]
	for {
		visit(x)
		if x == last {
			return
		}
		y := ((x | ^free) + x&-x) & free
		x = y | lowest[size-bits.OnesCount32(y)]
	}
}
