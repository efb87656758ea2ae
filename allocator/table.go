package allocator

import (
	"cmp"
	"math"
	"math/bits"
)

// table has the scores of every set of at most MaxExact GPUs. A set is a number with a bit for each GPU.
type table struct {
	score []int    // of each set
	next  []int    // of each set: the L of Topology, which is what the next requests could get
	numa  []uint32 // of each GPU: the GPUs of its NUMA node
	alike []uint32 // of each GPU: itself and the GPUs of its NUMA node that have the same scores with all others
}

func newTable(score [][]int, numa []set) *table {
	n := len(score)
	t := &table{score: make([]int, 1<<n), next: make([]int, 1<<n), numa: make([]uint32, n), alike: make([]uint32, n)}
	for x := uint32(1); x < 1<<n; x++ {
		// In the best disjoint pairs the lowest GPU has one of the others as its partner, or none.
		first, rest := bits.TrailingZeros32(x), x&(x-1)
		t.score[x], t.next[x] = t.score[rest], t.next[rest]
		for r := rest; r != 0; r &= r - 1 {
			s := score[first][bits.TrailingZeros32(r)]
			t.score[x] += s
			t.next[x] = max(t.next[x], s+t.next[rest&^(r&-r)])
		}
	}
	for _, size := range []int{4, 8} {
		best := make([]int, 1<<n) // the highest score of this many GPUs in each set
		for x := range uint32(1 << n) {
			switch count := bits.OnesCount32(x); {
			case count == size:
				best[x] = t.score[x]
			case count > size:
				for r := x; r != 0; r &= r - 1 {
					best[x] = max(best[x], best[x&^(r&-r)])
				}
			}
			t.next[x] += best[x]
		}
	}
	for a := range n {
		t.numa[a] = numa[a].word()
		for b := range n {
			if numa[a].contains(b) && alike(score, a, b) {
				t.alike[a] |= 1 << b
			}
		}
	}
	return t
}

// alike reports whether two GPUs have the same scores with all others. Then one can replace the other in any set.
func alike(score [][]int, a, b int) bool {
	for g := range score {
		if g != a && g != b && score[a][g] != score[b][g] {
			return false
		}
	}
	return true
}

// search compares every set. There are at most 12,870 (8 of 16 GPUs).
func (t *table) search(p Policy, q query) set {
	available, must := q.available.word(), q.must.word()
	best := found{numaNodes: math.MaxInt}
	t.eachSet(must, q.from.word()&^must, q.size-q.must.len(), func(x uint32) {
		numaNodes := 0
		if p == NUMA {
			numaNodes = t.numaNodes(x)
		}
		if cmp.Or(cmp.Compare(numaNodes, best.numaNodes), cmp.Compare(best.score, t.score[x])) > 0 {
			return
		}
		rest := available &^ x
		f := found{
			set: set{uint64(x)}, numaNodes: numaNodes, score: t.score[x], next: t.next[rest],
			cost: t.score[available] + t.score[x] - t.score[rest],
		}
		if f.compare(&best) < 0 {
			best = f
		}
	})
	return best.set
}

func (t *table) numaNodes(x uint32) (count int) {
	for ; x != 0; x &^= t.numa[bits.TrailingZeros32(x)] {
		count++
	}
	return count
}

// eachSet visits the unions of base and `size` of the free GPUs, in order. Of sets that differ only in GPUs that are
// alike, it visits only the first, so that there are few on real machines.
func (t *table) eachSet(base, free uint32, size int, visit func(uint32)) {
	if size == 0 {
		visit(base)
	}
	for size > 0 && size <= bits.OnesCount32(free) {
		first := free & -free
		t.eachSet(base|first, free&^first, size-1, visit)
		free &^= t.alike[bits.TrailingZeros32(first)]
	}
}
