package day

import "math/rand/v2"

// greedy takes the pair with the highest score, and then always the GPU that adds most; among equals the first.
func (m *machine) greedy(available set, size int) (set, error) {
	var chosen set
	if size > 1 {
		chosen = m.bestPair(available)
	}
	for chosen.size() < size {
		next, most := -1, -1
		for _, i := range available.without(chosen).indices() {
			if worth := m.worth[chosen|1<<i]; worth > most {
				next, most = i, worth
			}
		}
		chosen |= 1 << next
	}
	return chosen, nil
}

func (m *machine) bestPair(available set) set {
	var best set
	all := available.indices()
	for i, a := range all {
		for _, b := range all[i+1:] {
			if pair := set(1<<a | 1<<b); best == 0 || m.worth[pair] > m.worth[best] {
				best = pair
			}
		}
	}
	return best
}

// random takes any, each set as likely as every other.
func random(seed uint64) chooser {
	r := rand.New(rand.NewPCG(seed, 0))
	return func(available set, size int) (set, error) {
		all := available.indices()
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return setOf(all[:size]), nil
	}
}
