package allocator

import (
	"cmp"
	"math/bits"
	"slices"
)

// partitions finds the best partition of a set into sets of a size; where the size does not divide the number of GPUs,
// one set has what is over. One of those with the full size has all that must be included.
type partitions struct {
	table []int32
	size  int
	must  uint32
	// best has the best sum for a set of GPUs plus known, or 0 if it was not looked for.
	best []int32
}

// In partitions.best: no partition, and what is added to the sum of one.
const (
	impossible = 1
	known      = 2
)

func newPartitions(table []int32, size int, must uint32) *partitions {
	return &partitions{table: table, size: size, must: must, best: make([]int32, len(table))}
}

// sum is the best sum for the set of GPUs; false if there is no partition.
func (p *partitions) sum(x uint32) (int32, bool) {
	if x == 0 {
		return 0, true
	}
	if p.best[x] == 0 {
		p.best[x] = impossible
		p.eachFirst(x, func(first uint32) {
			if rest, ok := p.sum(x &^ first); ok {
				p.best[x] = max(p.best[x], p.table[first]+rest+known)
			}
		})
	}
	return p.best[x] - known, p.best[x] != impossible
}

// eachFirst calls with each set that a partition of x can have for its lowest GPU.
func (p *partitions) eachFirst(x uint32, visit func(uint32)) {
	lowest := x & -x
	eachSubset(x&^lowest, p.size-1, func(s uint32) {
		if s |= lowest; s&p.must == 0 || s&p.must == p.must {
			visit(s)
		}
	})
	over := bits.OnesCount32(x) % p.size
	if over == 0 {
		return
	}
	eachSubset(x&^lowest, over-1, func(s uint32) {
		if s |= lowest; s&p.must == 0 {
			visit(s)
		}
	})
}

// first is the best partition of x; of several the one whose sets come first, as in an enumeration that gives the lowest
// GPU that is left a set with the lowest others.
func (p *partitions) first(x uint32) []uint32 {
	var sets []uint32
	for x != 0 {
		best, _ := p.sum(x)
		var set uint32
		p.eachFirst(x, func(s uint32) {
			rest, ok := p.sum(x &^ s)
			if ok && p.table[s]+rest == best && (set == 0 || lower(s, set)) {
				set = s
			}
		})
		sets = append(sets, set)
		x &^= set
	}
	return sets
}

// partition is the answer to Partition, and then the sets that are in the next best partitions.
func (n *Node) partition(q query, k int) []found {
	if q.size == 0 {
		return []found{{exact: true}}
	}
	available, must := q.available.word(), q.must.word()
	x := n.ofBestPartition(available, must, q.size)
	all := []uint32{x}
	if k > 1 {
		all = append(all, n.ofOtherPartitions(q, x, k-1)...)
	}
	answers := make([]found, len(all))
	for i, x := range all {
		answers[i] = found{set: set{uint64(x)}, score: int(n.table[x]), exact: true}
	}
	return answers
}

func (n *Node) ofBestPartition(available, must uint32, size int) uint32 {
	var best uint32
	for _, s := range newPartitions(n.table, size, must).first(available) {
		full := bits.OnesCount32(s) == size && s&must == must
		if full && (best == 0 || n.table[s] > n.table[best]) {
			best = s
		}
	}
	return best
}

// ofOtherPartitions are sets other than x by the best partition that has them, then by their score.
func (n *Node) ofOtherPartitions(q query, x uint32, k int) []uint32 {
	type ranked struct {
		set        uint32
		sum, score int32
	}
	available, must := q.available.word(), q.must.word()
	p := newPartitions(n.table, q.size, 0)
	var all []ranked
	eachSubset(q.from.word()&^must, q.size-q.must.len(), func(s uint32) {
		if s |= must; s != x {
			rest, _ := p.sum(available &^ s)
			all = append(all, ranked{s, n.table[s] + rest, n.table[s]})
		}
	})
	slices.SortStableFunc(all, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(b.sum, a.sum), cmp.Compare(b.score, a.score))
	})
	var sets []uint32
	for _, r := range all[:min(k, len(all))] {
		sets = append(sets, r.set)
	}
	return sets
}
