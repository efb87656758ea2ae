package allocator

import (
	"cmp"
	"math/bits"
	"slices"
)

// partitions finds the best partitions of sets into sets of a size. If the size does not divide the number of GPUs, one
// set has the rest. One set of the full size contains must.
type partitions struct {
	table []int32
	size  int
	must  uint32
	// best has the sum of the best partition of each set, plus known. It is 0 where it was not computed yet.
	best []int32
}

// In partitions.best.
const (
	impossible = 1 // there is no partition
	known      = 2 // is added to the sum
)

func newPartitions(table []int32, size int, must uint32) *partitions {
	return &partitions{table: table, size: size, must: must, best: make([]int32, len(table))}
}

// sum returns the sum of the best partition of a set, and false if there is none.
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

// eachFirst visits the sets that can contain the lowest GPU in a partition of x.
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

// first returns the best partition of x. Of several it is the first if the sets are enumerated in order: each with the
// lowest GPU that is left and the lowest others.
func (p *partitions) first(x uint32) []uint32 {
	var sets []uint32
	for x != 0 {
		best, _ := p.sum(x)
		var set uint32
		p.eachFirst(x, func(s uint32) {
			rest, ok := p.sum(x &^ s)
			if ok && p.table[s]+rest == best && (set == 0 || before(s, set)) {
				set = s
			}
		})
		sets = append(sets, set)
		x &^= set
	}
	return sets
}

// searchPartitions returns the best set by Partition, followed by the sets of the next best partitions, then by score.
func (n *Node) searchPartitions(q query, k int) []found {
	if q.size == 0 {
		return []found{{exact: true}}
	}
	available, must := q.available.word(), q.must.word()
	var best uint32
	for _, s := range newPartitions(n.table, q.size, must).first(available) {
		full := bits.OnesCount32(s) == q.size && s&must == must
		if full && (best == 0 || n.table[s] > n.table[best]) {
			best = s
		}
	}
	sets := []uint32{best}
	if k > 1 {
		type ranked struct {
			set        uint32
			sum, score int32
		}
		p := newPartitions(n.table, q.size, 0)
		var others []ranked
		eachSubset(q.from.word()&^must, q.size-q.must.len(), func(s uint32) {
			if s |= must; s != best {
				rest, _ := p.sum(available &^ s)
				others = append(others, ranked{s, n.table[s] + rest, n.table[s]})
			}
		})
		slices.SortStableFunc(others, func(a, b ranked) int {
			return cmp.Or(cmp.Compare(b.sum, a.sum), cmp.Compare(b.score, a.score))
		})
		for _, r := range others[:min(k-1, len(others))] {
			sets = append(sets, r.set)
		}
	}
	answers := make([]found, len(sets))
	for i, x := range sets {
		answers[i] = found{set: set{uint64(x)}, score: int(n.table[x]), exact: true}
	}
	return answers
}
