// Package day simulates days of a node, with requests that come and go, and measures how good the GPUs are that each
// policy gives them: right away, and in the state in which it leaves the node for those that come later. The table in
// docs/allocator.md is made here.
package day

import (
	"fmt"
	"slices"
)

// chooser returns so many of the available GPUs.
type chooser func(available set, size int) (set, error)

// tally sums up the requests of one size.
type tally struct {
	asked, refused int
	// ofNow and ofEmpty are sums over those that were given GPUs: the score of these, as a share of the best score that
	// was possible at that moment, and of the best on the empty machine.
	ofNow, ofEmpty float64
}

// run is a day of a machine: every request that fits is given what choose returns, until it leaves; the others are refused
// and do not come again. So how many GPUs are free, and who is refused, does not depend on the policy.
func run(m *machine, day []request, choose chooser) (map[int]*tally, error) {
	result := map[int]*tally{}
	for _, s := range sizesFor(m.gpus) {
		result[s] = &tally{}
	}
	type pod struct {
		set   set
		leave float64
	}
	var pods []pod
	free := m.all()
	for _, r := range day {
		pods = slices.DeleteFunc(pods, func(p pod) bool {
			if p.leave <= r.come {
				free |= p.set
			}
			return p.leave <= r.come
		})
		t := result[r.size]
		t.asked++
		if free.size() < r.size {
			t.refused++
			continue
		}
		chosen, err := choose(free, r.size)
		if err != nil {
			return nil, err
		}
		if chosen.size() != r.size || chosen.without(free) != 0 {
			return nil, fmt.Errorf("%s: chose %v for %d of %v", m.name, chosen.indices(), r.size, free.indices())
		}
		t.add(m, free, chosen)
		free = free.without(chosen)
		pods = append(pods, pod{chosen, r.leave})
	}
	return result, nil
}

func (t *tally) add(m *machine, free, chosen set) {
	best, worth := m.best[chosen.size()], float64(m.worth[chosen])
	if best[free] > 0 {
		t.ofNow += worth / float64(best[free])
		t.ofEmpty += worth / float64(best[m.all()])
	}
}
