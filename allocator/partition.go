package allocator

import (
	"math"
	"math/bits"
	"slices"
)

// partitions finds the best partitions of sets into sets of a given size. If the number of GPUs is not a multiple of
// that size, one set is smaller. One set of the full size contains `must`.
type partitions struct {
	*table
	size int
	must uint32
	best []int // for each set: the sum of its best partition, unknown, or impossible
}

// Special values in partitions.best.
const (
	unknown    = -1
	impossible = math.MinInt / 2 // there is no partition; it stays far below all sums if scores are added
)

// sum returns the sum of the best partition of a set.
func (p *partitions) sum(x uint32) int {
	if x == 0 {
		return 0
	}
	if p.best[x] == unknown {
		most := impossible
		p.eachFirst(x, func(first uint32) { most = max(most, p.score[first]+p.sum(x&^first)) })
		p.best[x] = most
	}
	return p.best[x]
}

// eachFirst visits the sets that can contain the lowest GPU in a partition of x. Either all of `must` is in x or none
// of it.
func (p *partitions) eachFirst(x uint32, visit func(uint32)) {
	lowest := x & -x
	others := x &^ lowest &^ p.must
	if x&p.must != 0 {
		with := lowest | p.must
		p.eachSet(with, others, p.size-bits.OnesCount32(with), visit)
	}
	if lowest&p.must == 0 {
		p.eachSet(lowest, others, p.size-1, visit)
		if over := bits.OnesCount32(x) % p.size; over > 0 {
			p.eachSet(lowest, others, over-1, visit)
		}
	}
}

// first returns the best partition of x. Of several best ones it returns the first in the order of enumeration, in
// which each set has the lowest GPU that is left, and with it the lowest others.
func (p *partitions) first(x uint32) []uint32 {
	var sets []uint32
	for x != 0 {
		var first uint32
		p.eachFirst(x, func(s uint32) {
			best := p.score[s]+p.sum(x&^s) == p.sum(x)
			if best && (first == 0 || set{uint64(s)}.before(set{uint64(first)})) {
				first = s
			}
		})
		sets = append(sets, first)
		x &^= first
	}
	return sets
}

// searchPartitions returns the best set for the policy Partition.
func (t *table) searchPartitions(q query) set {
	available, must := q.available.word(), q.must.word()
	if q.size == 0 {
		return set{}
	}
	p := &partitions{table: t, size: q.size, must: must, best: slices.Repeat([]int{unknown}, len(t.score))}
	var best uint32
	for _, s := range p.first(available) {
		full := bits.OnesCount32(s) == q.size && s&must == must
		if full && (best == 0 || t.score[s] > t.score[best]) {
			best = s
		}
	}
	return set{uint64(best)}
}
