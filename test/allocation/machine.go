package allocation

import (
	"math/bits"
	"math/rand/v2"
)

// set is a set of GPUs, a bit for each index.
type set uint32

func (s set) size() int         { return bits.OnesCount32(uint32(s)) }
func (s set) without(o set) set { return s &^ o }

// indices returns the GPUs of the set, in order.
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

// machine is a machine of at most 16 GPUs with the score of each set of them. It computes the scores by trying every
// set, so that the measure does not depend on the allocator that is measured.
type machine struct {
	name string
	gpus int
	// score has the score of each set. best has, by size, the highest score of a subset of that size, for each set.
	score []int
	best  map[int][]int
}

// newMachine computes the scores of all sets from those of the pairs.
func newMachine(name string, gpus int, pair func(a, b int) int) *machine {
	m := &machine{name: name, gpus: gpus, score: make([]int, 1<<gpus), best: map[int][]int{}}
	for s := set(1); s <= m.all(); s++ {
		first := bits.TrailingZeros32(uint32(s))
		rest := s & (s - 1)
		m.score[s] = m.score[rest]
		for _, other := range rest.indices() {
			m.score[s] += pair(first, other)
		}
	}
	for _, size := range sizesFor(m.gpus) {
		m.best[size] = m.bestOf(size)
	}
	return m
}

func (m *machine) all() set { return 1<<m.gpus - 1 }

// bestOf returns for each set the highest score of its subsets of a size, or 0 if the set is smaller.
func (m *machine) bestOf(size int) []int {
	best := make([]int, 1<<m.gpus)
	for s := set(1); s <= m.all(); s++ {
		switch {
		case s.size() == size:
			best[s] = m.score[s]
		case s.size() > size:
			for _, i := range s.indices() {
				best[s] = max(best[s], best[s.without(1<<i)])
			}
		}
	}
	return best
}

// chooser chooses size GPUs from the available ones.
type chooser func(available set, size int) (set, error)

// chooseGreedily takes the pair with the highest score, and then always the GPU that adds most. If several are equal,
// it takes the first.
func (m *machine) chooseGreedily(available set, size int) (set, error) {
	var chosen set
	all := available.indices()
	for i, a := range all {
		for _, b := range all[i+1:] {
			if pair := set(1<<a | 1<<b); size > 1 && (chosen == 0 || m.score[pair] > m.score[chosen]) {
				chosen = pair
			}
		}
	}
	for chosen.size() < size {
		next, most := -1, -1
		for _, i := range available.without(chosen).indices() {
			if score := m.score[chosen|1<<i]; score > most {
				next, most = i, score
			}
		}
		chosen |= 1 << next
	}
	return chosen, nil
}

// chooseRandomly returns a chooser for which all sets are equally likely.
func chooseRandomly(seed uint64) chooser {
	r := rand.New(rand.NewPCG(seed, 0))
	return func(available set, size int) (set, error) {
		all := available.indices()
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return setOf(all[:size]), nil
	}
}
