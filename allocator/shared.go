package allocator

import (
	"cmp"
	"slices"
)

// chooseShared does what Choose does, for GPUs with several devices.
func (p *Pool) chooseShared(policy Policy, r Request, states []state) Choice {
	s := p.newSharing(r, states)
	var c Choice
	if policy == Pack && !p.replicas {
		s.pack()
	} else {
		s.spread(policy)
	}
	var gpus set
	var indexes []int
	for g, count := range s.chosen {
		if count > 0 {
			gpus.add(g)
			indexes = append(indexes, p.pick(states, g, count)...)
		}
	}
	slices.Sort(indexes)
	for _, i := range indexes {
		c.IDs = append(c.IDs, p.devices[i].ID)
	}
	c.Score = p.gpus.scoreOf(gpus)
	return c
}

// sharing finds how many devices to take from each GPU. Its slices are by GPU.
type sharing struct {
	pool *Pool
	// free are the numbers of available devices, must those of devices that must be included, and used those of
	// devices that are not available.
	free, must, used []int
	slices           []int // compute slices that MIG devices use, of this pool and others
	chosen           []int // devices in the answer
	left             int   // devices still to take
}

func (p *Pool) newSharing(r Request, states []state) *sharing {
	n := len(p.gpus.list)
	s := &sharing{
		pool: p, free: make([]int, n), must: make([]int, n), used: make([]int, n), slices: make([]int, n), left: r.Size,
	}
	for g, devices := range p.perGPU {
		for _, i := range devices {
			switch states[i] {
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
		s.slices[g] += r.Used[p.gpus.list[g].uuid]
		s.left -= s.must[g]
	}
	s.chosen = slices.Clone(s.must)
	return s
}

// spread repeatedly takes a device from the GPUs with the lowest load. Of GPUs with the same load, those come first of
// which no device is taken yet, among these the lowest in order, and then the best by the policy.
func (s *sharing) spread(policy Policy) {
	load, order := slices.Clone(s.must), make([]int, len(s.must))
	for g, used := range s.used {
		switch {
		case policy == Spread && s.pool.replicas:
			order[g] = used
		case policy == Spread:
			load[g] += used
		case policy == Pack:
			order[g] = -used
		}
	}
	for s.left > 0 {
		var gpus []int // the GPUs that come first
		var lowest [3]int
		for g := range load {
			if s.chosen[g] == s.free[g] {
				continue
			}
			key := [3]int{load[g], min(s.chosen[g], 1), order[g]}
			c := slices.Compare(key[:], lowest[:])
			if len(gpus) == 0 || c < 0 {
				gpus, lowest = []int{g}, key
			} else if c == 0 {
				gpus = append(gpus, g)
			}
		}
		if len(gpus) > s.left && s.chosen[gpus[0]] == 0 {
			best := s.best(policy, gpus)
			gpus = slices.DeleteFunc(gpus, func(g int) bool { return !best.contains(g) })
		}
		for _, g := range gpus[:min(len(gpus), s.left)] {
			s.chosen[g]++
			s.left--
			load[g]++
		}
	}
}

// best returns the best set that has the GPUs in the answer and as many others as there are devices left to take.
func (s *sharing) best(policy Policy, others []int) set {
	var q query
	for g := range s.chosen {
		if s.chosen[g] > 0 {
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
	return s.pool.gpus.search(policy, q)
}

// pack takes devices from as few GPUs as possible, by the objective of Pack for MIG devices.
func (s *sharing) pack() {
	// The GPUs of the devices that must be included come first.
	var x set
	var others []int
	need := s.left
	for g := range s.free {
		switch {
		case s.must[g] > 0:
			x.add(g)
			need -= s.free[g] - s.must[g]
		case s.free[g] > 0:
			others = append(others, g)
		}
	}
	most := slices.Clone(others)
	slices.SortStableFunc(most, func(a, b int) int { return cmp.Compare(s.free[b], s.free[a]) })
	count := 0
	for have := 0; have < need; count++ {
		have += s.free[most[count]]
	}
	for ; s.pool.gpus.table == nil && count > 1; count-- { // there are too many sets to compare
		g := slices.MaxFunc(others, func(a, b int) int {
			return cmp.Or(s.free[a]-s.free[b], s.pool.gpus.scoreWith(x, a)-s.pool.gpus.scoreWith(x, b))
		})
		x.add(g)
		need -= s.free[g]
		others = slices.DeleteFunc(others, func(other int) bool { return other == g })
	}
	gpus := s.bestToPack(x, others, count, need).members()
	slices.SortStableFunc(gpus, func(a, b int) int { return cmp.Compare(s.free[a], s.free[b]) })
	for _, g := range gpus {
		some := min(s.left, s.free[g]-s.chosen[g])
		s.chosen[g] += some
		s.left -= some
	}
}

// bestToPack compares all sets of `count` other GPUs that together have enough devices. It returns the best set, with
// base added.
func (s *sharing) bestToPack(base set, others []int, count, need int) set {
	var best set
	var bestCost []int
	var try func(x set, others []int, count, over, inUse int)
	try = func(x set, others []int, count, over, inUse int) {
		if count == 0 {
			cost := []int{-inUse, over, -s.pool.gpus.scoreOf(x)}
			if over >= 0 && (bestCost == nil || slices.Compare(cost, bestCost) < 0) {
				best, bestCost = x, cost
			}
			return
		}
		for i, g := range others[:len(others)-count+1] {
			with := x
			with.add(g)
			try(with, others[i+1:], count-1, over+s.free[g], inUse+s.slices[g])
		}
	}
	try(base, others, count, -need, 0)
	return best
}

// pick chooses count devices of a GPU and marks them as not available. Devices that must be included come first, and
// then, in order, those of which the fewest replicas are chosen.
func (p *Pool) pick(states []state, g, count int) []int {
	var picked []int
	times := map[string]int{} // by UUID
	pick := func(i int) {
		picked, states[i] = append(picked, i), unavailable
		times[p.devices[i].UUID]++
	}
	for _, i := range p.perGPU[g] {
		if states[i] == included {
			pick(i)
		}
	}
	for len(picked) < count {
		next := -1
		for _, i := range p.perGPU[g] {
			if states[i] == available && (next < 0 || times[p.devices[i].UUID] < times[p.devices[next].UUID]) {
				next = i
			}
		}
		pick(next)
	}
	return picked
}
