package day

import (
	"math/bits"
)

// set is a set of GPUs, a bit for each index.
type set uint32

func (s set) size() int         { return bits.OnesCount32(uint32(s)) }
func (s set) without(o set) set { return s &^ o }

// indices are the GPUs of the set, in order.
func (s set) indices() []int {
	var all []int
	for ; s != 0; s &= s - 1 {
		all = append(all, bits.TrailingZeros32(uint32(s)))
	}
	return all
}

func setOf(indices []int) set {
	var s set
	for _, i := range indices {
		s |= 1 << i
	}
	return s
}

// machine is a machine of at most 16 GPUs, and what each set of them is worth. It looks at every set there is, so that
// what it says is best does not come from what is measured with it.
type machine struct {
	name string
	gpus int
	// worth has the score of each set, and best, for each size, the highest score of that many GPUs of each set.
	worth []int
	best  map[int][]int
}

// newMachine takes the score of each pair of GPUs from score.
func newMachine(name string, gpus int, score func(a, b int) int) *machine {
	m := &machine{name: name, gpus: gpus, best: map[int][]int{}}
	m.worth = make([]int, 1<<m.gpus)
	for s := set(1); s <= m.all(); s++ {
		first := bits.TrailingZeros32(uint32(s))
		rest := s & (s - 1)
		m.worth[s] = m.worth[rest]
		for _, other := range rest.indices() {
			m.worth[s] += score(first, other)
		}
	}
	for _, size := range sizesFor(m.gpus) {
		m.best[size] = m.bestOf(size)
	}
	return m
}

func (m *machine) all() set { return 1<<m.gpus - 1 }

// bestOf has for each set the highest score of a subset of that size; sets that are smaller have none.
func (m *machine) bestOf(size int) []int {
	best := make([]int, 1<<m.gpus)
	for s := set(1); s <= m.all(); s++ {
		switch {
		case s.size() == size:
			best[s] = m.worth[s]
		case s.size() > size:
			for _, i := range s.indices() {
				best[s] = max(best[s], best[s.without(1<<i)])
			}
		}
	}
	return best
}
