package allocator

import (
	"math/bits"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// fillTable fills the score of every set: that of its lowest GPU with the others, and theirs.
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

// fillNext fills next[x] with what requests of the usual sizes could get of x: the best pairs, and the best sets of 4 and
// of 8.
func (n *Node) fillNext() {
	n.next = n.bestPairs()
	best := make([]int32, len(n.table))
	for _, k := range []int{4, 8} {
		for x := range uint32(len(n.table)) {
			switch size := bits.OnesCount32(x); {
			case size < k:
				continue
			case size == k:
				best[x] = n.table[x]
			default:
				best[x] = bestWithoutOne(best, x, k)
			}
			n.next[x] += best[x]
		}
		clear(best)
	}
}

// bestPairs has the highest score that pairs of each set have together: its lowest GPU is in one of them, or in none.
func (n *Node) bestPairs() []int32 {
	pairs := make([]int32, len(n.table))
	for x := uint32(1); x < uint32(len(pairs)); x++ {
		rest := x & (x - 1)
		row, most := n.score[bits.TrailingZeros32(x)], pairs[rest]
		for r := rest; r != 0; r &= r - 1 {
			most = max(most, row[bits.TrailingZeros32(r)]+pairs[rest&^(r&-r)])
		}
		pairs[x] = most
	}
	return pairs
}

// bestWithoutOne is the best for k GPUs of x: of any k+1 GPUs the best set lacks one.
func bestWithoutOne(best []int32, x uint32, k int) int32 {
	most := int32(0)
	for r, i := x, 0; i <= k; i++ {
		most = max(most, best[x&^(r&-r)])
		r &= r - 1
	}
	return most
}

// fillNUMA notes which GPUs are on each NUMA node. Those on no known node count as being on one.
func (n *Node) fillNUMA() {
	at := map[int]int{}
	for g := range n.gpus {
		node := max(n.gpus[g].NUMANode, gpu.NoNUMANode)
		i, ok := at[node]
		if !ok {
			i = len(n.numa)
			at[node] = i
			n.numa = append(n.numa, set{})
		}
		n.numa[i].add(g)
	}
}

// candidate is a set of GPUs with what it is judged by.
type candidate struct {
	gpus  uint32
	nodes int32 // NUMA nodes, if they count
	score int32
	next  int32 // what the next requests could get of what stays
	left  int32 // the score of what stays
}

// compare is negative if a is the better one. No two sets are equal.
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
	case lower(a.gpus, b.gpus):
		return -1
	default:
		return 1
	}
}

// lower tells which of two sets has the first GPU in which they differ.
func lower(a, b uint32) bool {
	differ := a ^ b
	return a&(differ&-differ) != 0
}

// podium holds the best so far, best first.
type podium struct {
	size int
	best []candidate
}

// admits tells that a candidate may be among the best, judged by what costs least to know.
func (p *podium) admits(c *candidate) bool {
	if len(p.best) < p.size {
		return true
	}
	worst := &p.best[len(p.best)-1]
	return c.nodes < worst.nodes || c.nodes == worst.nodes && c.score >= worst.score
}

func (p *podium) add(c candidate) {
	if len(p.best) == p.size {
		if c.compare(&p.best[len(p.best)-1]) > 0 {
			return
		}
		p.best = p.best[:len(p.best)-1]
	}
	i, _ := slices.BinarySearchFunc(p.best, c, func(a, b candidate) int { return a.compare(&b) })
	p.best = slices.Insert(p.best, i, c)
}

// searchTable looks at every set: at most 12,870 of 16 GPUs. With NUMA nodes, fewer of them come before all else.
func (n *Node) searchTable(q query, nodes []set, k int) []found {
	available, must := q.available.word(), q.must.word()
	top := podium{size: k}
	eachSubset(q.from.word()&^must, q.size-q.must.len(), func(x uint32) {
		x |= must
		c := candidate{gpus: x, nodes: touched(nodes, x), score: n.table[x]}
		if !top.admits(&c) {
			return
		}
		rest := available &^ x
		c.next, c.left = n.next[rest], n.table[rest]
		top.add(c)
	})
	all := make([]found, len(top.best))
	for i, c := range top.best {
		all[i] = found{set: set{uint64(c.gpus)}, score: int(c.score), exact: true}
	}
	return all
}

// touched counts the nodes that have a GPU of x.
func touched(nodes []set, x uint32) int32 {
	count := int32(0)
	for i := range nodes {
		if nodes[i].word()&x != 0 {
			count++
		}
	}
	return count
}

// eachSubset calls with each subset of a size. It is Gosper's hack (HAKMEM 175) on the bits of free alone: those between
// them are set for the addition, so that its carry passes over them.
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
