package allocator

import (
	"cmp"
	"math/bits"
	"slices"
)

// sharing finds how many devices a request takes of each GPU. Its slices are by GPU.
type sharing struct {
	pool *Pool
	// free counts the available devices, must those of them that must be included, used the devices that are not
	// available.
	free, must, used []int
	slices           []int // compute slices in use by MIG devices of this pool and others
	taken            []int // devices in the answer
	left             int   // devices still to take
}

func (p *Pool) newSharing(r *resolved) *sharing {
	n := len(p.node.gpus)
	s := &sharing{
		pool: p, free: make([]int, n), must: make([]int, n), used: make([]int, n), slices: make([]int, n), left: r.size,
	}
	for g, devices := range p.perGPU {
		for _, i := range devices {
			switch r.state[i] {
			case included:
				s.must[g]++
				s.free[g]++
			case available:
				s.free[g]++
			case unavailable:
				s.slices[g] += max(p.devices[i].Slices, 1)
			}
		}
		s.used[g] = len(devices) - s.free[g]
		s.slices[g] += r.used[p.node.gpus[g].uuid]
		s.left -= s.must[g]
	}
	s.taken = slices.Clone(s.must)
	return s
}

func (s *sharing) take(g int) {
	s.taken[g]++
	s.left--
}

// spread takes a device of each of the GPUs with the lowest load, again and again. When fewer devices are left to take
// than GPUs have the lowest load, the GPUs without a device in the answer come first, among these the lowest in order,
// and then the best by the policy. It reports whether the choice of GPUs is exact, and the bound of their score.
func (s *sharing) spread(policy Policy, load, order []int) (exact bool, bound int) {
	load = slices.Clone(load)
	for g, m := range s.must {
		load[g] += m
	}
	for s.left > 0 {
		var lowest []int // GPUs
		for g := range load {
			switch {
			case s.taken[g] == s.free[g]:
			case len(lowest) == 0 || load[g] < load[lowest[0]]:
				lowest = append(lowest[:0], g)
			case load[g] == load[lowest[0]]:
				lowest = append(lowest, g)
			}
		}
		if len(lowest) > s.left {
			return s.takeSome(policy, lowest, order)
		}
		for _, g := range lowest {
			s.take(g)
			load[g]++
		}
	}
	return true, 0
}

// takeSome takes a device each of as many of the GPUs as are left to take.
func (s *sharing) takeSome(policy Policy, gpus, order []int) (exact bool, bound int) {
	exact = true
	slices.SortStableFunc(gpus, func(a, b int) int {
		return cmp.Or(cmp.Compare(min(s.taken[a], 1), min(s.taken[b], 1)), cmp.Compare(order[a], order[b]))
	})
	for len(gpus) > 0 && s.left > 0 {
		first := gpus[0]
		equal := slices.IndexFunc(gpus, func(g int) bool {
			return order[g] != order[first] || (s.taken[g] > 0) != (s.taken[first] > 0)
		})
		if equal < 0 {
			equal = len(gpus)
		}
		part := gpus[:equal]
		gpus = gpus[equal:]
		if len(part) > s.left && s.taken[first] == 0 {
			f := s.best(policy, part)
			exact, bound = f.exact, f.bound
			part = slices.DeleteFunc(part, func(g int) bool { return !f.set.contains(g) })
		}
		for _, g := range part[:min(len(part), s.left)] {
			s.take(g)
		}
	}
	return exact, bound
}

// best returns the best set of the GPUs in the answer and as many of others as devices are left to take.
func (s *sharing) best(policy Policy, others []int) found {
	var q query
	for g := range s.taken {
		if s.taken[g] > 0 {
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

// pack takes the devices of as few GPUs as possible, by the objective of Pack for MIG devices. It reports whether the
// choice of GPUs is exact.
func (s *sharing) pack() (exact bool) {
	// The GPUs of the devices that must be included come first.
	var x, others set
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
	exact = true
	switch {
	case need <= 0:
	case s.pool.node.table == nil:
		x = s.fillGPUs(x, others, need)
		exact = x.len() == 1
	default:
		x = s.bestToPack(x, others, need)
	}
	gpus := x.members()
	slices.SortStableFunc(gpus, func(a, b int) int { return cmp.Compare(s.free[a], s.free[b]) })
	for _, g := range gpus {
		for s.left > 0 && s.taken[g] < s.free[g] {
			s.take(g)
		}
	}
	return exact
}

// bestToPack compares all sets of as few other GPUs as have the needed devices, and returns the best with must.
func (s *sharing) bestToPack(must, others set, need int) set {
	var free []int
	for _, g := range others.members() {
		free = append(free, s.free[g])
	}
	slices.Sort(free)
	count := 0
	for most := 0; most < need; count++ {
		most += free[len(free)-1-count]
	}
	sum := func(values []int, x uint32) int {
		sum := 0
		for ; x != 0; x &= x - 1 {
			sum += values[bits.TrailingZeros32(x)]
		}
		return sum
	}
	var best uint32
	var bestCost [3]int
	eachSubset(others.word(), count, func(x uint32) {
		over := sum(s.free, x) - need
		if over < 0 {
			return
		}
		all := x | must.word()
		cost := [3]int{-sum(s.slices, x), over, -int(s.pool.node.table[all])}
		c := slices.Compare(cost[:], bestCost[:])
		if best == 0 || c < 0 || c == 0 && before(all, best) {
			best, bestCost = all, cost
		}
	})
	return set{uint64(best)}
}

// fillGPUs adds the GPU with the most free devices to x until one has enough for the rest: then the fullest of those.
func (s *sharing) fillGPUs(x, others set, need int) set {
	for need > 0 {
		gpus := others.members()
		best := slices.MinFunc(gpus, func(a, b int) int {
			fitsA, fitsB := s.free[a] >= need, s.free[b] >= need
			connected := cmp.Compare(s.pool.node.scoreWith(x, b), s.pool.node.scoreWith(x, a))
			switch {
			case fitsA && fitsB:
				return cmp.Or(cmp.Compare(s.slices[b], s.slices[a]), cmp.Compare(s.free[a], s.free[b]), connected)
			default: // a GPU that has enough has more than one that has not
				return cmp.Or(cmp.Compare(s.free[b], s.free[a]), connected)
			}
		})
		x.add(best)
		others.remove(best)
		need -= s.free[best]
	}
	return x
}
