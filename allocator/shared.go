package allocator

import (
	"cmp"
	"math/bits"
	"slices"
)

// stock is what a request can have of each GPU of a node, and what it gets.
type stock struct {
	pool *Pool
	// free counts the devices of each GPU that are available, must those of them that are in the answer in any case, used
	// those that somebody else has.
	free, must, used []int
	slices           []int // of each GPU: its compute slices that containers have as MIG devices, of this pool or not
	take             []int
	left             int // devices that are still to be taken
}

func (p *Pool) stock(r *resolved) *stock {
	n := len(p.node.gpus)
	zeros := func() []int { return make([]int, n) }
	s := &stock{pool: p, free: zeros(), must: zeros(), used: zeros(), slices: zeros(), left: r.size}
	for g, places := range p.perGPU {
		for _, i := range places {
			switch r.state[i] {
			case taken:
				s.must[g]++
				s.free[g]++
			case available:
				s.free[g]++
			case elsewhere:
				s.slices[g] += max(p.devices[i].Slices, 1)
			}
		}
		s.used[g] = len(places) - s.free[g]
		s.slices[g] += r.used[p.node.gpus[g].UUID]
	}
	s.take = slices.Clone(s.must)
	for _, m := range s.must {
		s.left -= m
	}
	return s
}

// even takes one device at a time of the GPU whose load is least. Of those with the same load that come last, where there
// are more than are needed, GPUs that have none in the answer yet come before others; among these those with the least
// in order, and then the best by the policy.
func (s *stock) even(policy Policy, load, order []int) (bool, int) {
	load = slices.Clone(load)
	for g, m := range s.must {
		load[g] += m
	}
	for s.left > 0 {
		least := s.leastLoaded(load)
		if len(least) > s.left {
			return s.some(policy, least, order)
		}
		for _, g := range least {
			s.takeOne(g)
			load[g]++
		}
	}
	return true, 0
}

func (s *stock) takeOne(g int) {
	s.take[g]++
	s.left--
}

// leastLoaded are the GPUs that have something left and whose load is least.
func (s *stock) leastLoaded(load []int) []int {
	var least []int
	for g := range load {
		switch {
		case s.take[g] == s.free[g]:
		case len(least) == 0 || load[g] < load[least[0]]:
			least = append(least[:0], g)
		case load[g] == load[least[0]]:
			least = append(least, g)
		}
	}
	return least
}

// some takes one device of each of as many of the GPUs as are left to be taken. It reports whether there is no better
// choice, and how much higher the score of another can be.
func (s *stock) some(policy Policy, gpus, order []int) (exact bool, bound int) {
	exact = true
	isIn := func(g int) bool { return s.take[g] > 0 }
	fresh, others := without(gpus, isIn), without(gpus, func(g int) bool { return !isIn(g) })
	for _, part := range inOrder(fresh, order) {
		if s.left > 0 && len(part) > s.left {
			f := s.best(policy, part)
			exact, bound = f.exact, f.bound
			part = without(part, func(g int) bool { return !f.set.has(g) })
		}
		s.takeEach(part)
	}
	for _, part := range inOrder(others, order) {
		s.takeEach(part)
	}
	return exact, bound
}

// takeEach takes one device of each of the GPUs, until enough are taken.
func (s *stock) takeEach(gpus []int) {
	for _, g := range gpus[:min(len(gpus), s.left)] {
		s.takeOne(g)
	}
}

// inOrder are the GPUs in groups of the same order, the least first.
func inOrder(gpus, order []int) [][]int {
	slices.SortStableFunc(gpus, func(a, b int) int { return cmp.Compare(order[a], order[b]) })
	var groups [][]int
	for i, g := range gpus {
		if i == 0 || order[g] != order[gpus[i-1]] {
			groups = append(groups, nil)
		}
		groups[len(groups)-1] = append(groups[len(groups)-1], g)
	}
	return groups
}

// best is the best set of the GPUs that are in the answer, and as many of others as are left to be taken.
func (s *stock) best(policy Policy, others []int) found {
	var q query
	for g := range s.take {
		if s.take[g] > 0 {
			q.must.add(g)
		}
		if s.free[g] > 0 {
			q.available.add(g)
		}
	}
	q.from = q.must
	for _, g := range others {
		q.from.add(g)
	}
	q.size = q.must.len() + s.left
	return s.pool.node.rank(policy, q, 1)[0]
}

// packed takes the devices of as few GPUs as can be; of such sets of GPUs the one with most compute slices in use, then
// the one that has least left over, then the best connected one. What is left over is on the GPU of them that has most.
func (s *stock) packed() (exact bool) {
	x, exact := s.fullest()
	gpus := x.places()
	slices.SortStableFunc(gpus, func(a, b int) int { return cmp.Compare(s.free[a], s.free[b]) })
	for _, g := range gpus {
		for s.left > 0 && s.take[g] < s.free[g] {
			s.takeOne(g)
		}
	}
	return exact
}

// fullest is the set of GPUs for packed.
func (s *stock) fullest() (x set, exact bool) {
	var others set
	need := s.left
	for g := range s.free {
		switch {
		case s.must[g] > 0:
			x.add(g)
			need -= s.free[g] - s.must[g]
		case s.free[g] > 0:
			others.add(g)
		}
	}
	if need <= 0 {
		return x, true
	}
	if s.pool.node.table == nil {
		some := s.fullestOneByOne(x, others, need)
		return some, some.len() == 1
	}
	return s.fullestOfAll(x, others, need), true
}

// fullestOfAll compares all sets with as few GPUs as can be.
func (s *stock) fullestOfAll(must, others set, need int) set {
	n := s.pool.node
	var best uint32
	var bestCost [3]int
	eachSubset(others.word(), s.fewest(others, need), func(x uint32) {
		over := sumOver(s.free, x) - need
		if over < 0 {
			return
		}
		all := x | must.word()
		cost := [3]int{-sumOver(s.slices, x), over, -int(n.table[all])}
		c := slices.Compare(cost[:], bestCost[:])
		if best == 0 || c < 0 || c == 0 && lower(all, best) {
			best, bestCost = all, cost
		}
	})
	return set{uint64(best)}
}

// fewest is how many of the GPUs are needed to have that many devices.
func (s *stock) fewest(gpus set, need int) int {
	var free []int
	for _, g := range gpus.places() {
		free = append(free, s.free[g])
	}
	slices.Sort(free)
	count := 0
	for ; need > 0; count++ {
		need -= free[len(free)-1-count]
	}
	return count
}

// sumOver adds up the values of the GPUs in x.
func sumOver(values []int, x uint32) int {
	sum := 0
	for ; x != 0; x &= x - 1 {
		sum += values[bits.TrailingZeros32(x)]
	}
	return sum
}

// fullestOneByOne takes the GPU with most free until one has enough for the rest: then the fullest of those.
func (s *stock) fullestOneByOne(x, others set, need int) set {
	for need > 0 {
		best := -1
		for _, g := range others.places() {
			if best < 0 || s.fitsBetter(need, x, g, best) {
				best = g
			}
		}
		x.add(best)
		others.remove(best)
		need -= s.free[best]
	}
	return x
}

// fitsBetter tells whether GPU a is better for the rest of a request than b.
func (s *stock) fitsBetter(need int, x set, a, b int) bool {
	n := s.pool.node
	switch fits := s.free[a] >= need; {
	case fits != (s.free[b] >= need):
		return fits
	case fits && s.slices[a] != s.slices[b]:
		return s.slices[a] > s.slices[b]
	case s.free[a] != s.free[b]:
		return s.free[a] < s.free[b] == fits
	default:
		return n.with(x, a) > n.with(x, b)
	}
}
