// Package allocation compares allocation policies on simulated days of a node. Requests arrive and depart, and each
// policy is measured by the scores of the GPUs that it chooses, relative to the best possible at that moment and to the
// best on an empty machine. It writes the table in docs/allocator.md.
package allocation

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// The load. Times have no unit: only the ratio of the stay to the time between arrivals counts.
const (
	arrivals = 10_000 // per day
	meanStay = 1.0
)

// sizes are the sizes of requests in GPUs. All are equally frequent.
var sizes = []int{1, 2, 4, 8}

// sizesFor returns the sizes that fit into a machine.
func sizesFor(gpus int) []int {
	return slices.DeleteFunc(slices.Clone(sizes), func(s int) bool { return s > gpus })
}

// request is a request for a number of GPUs from one time to another.
type request struct {
	size           int
	arrive, depart float64
}

// requests returns the requests of a day: Poisson arrivals and exponential stays, such that on average the given share
// of the machine is requested. The same seed gives the same day.
func requests(seed uint64, gpus int, share float64) []request {
	random := rand.New(rand.NewPCG(seed, uint64(gpus)))
	fit, total := sizesFor(gpus), 0
	for _, s := range fit {
		total += s
	}
	perTime := share * float64(gpus) * float64(len(fit)) / (float64(total) * meanStay)
	day := make([]request, arrivals)
	now := 0.0
	for i := range day {
		now += random.ExpFloat64() / perTime
		stay := random.ExpFloat64() * meanStay
		day[i] = request{size: fit[random.IntN(len(fit))], arrive: now, depart: now + stay}
	}
	return day
}

// tally adds up the requests of one size.
type tally struct {
	requests, refused int
	// ofPossible and ofEmpty are the sums of the chosen sets' scores, as shares of the best score possible at that
	// moment, and of the best score on an empty machine.
	ofPossible, ofEmpty float64
}

func (t tally) granted() float64 { return float64(t.requests - t.refused) }

// simulateDay returns the tallies of a day by size. A request that fits gets the GPUs that choose returns until it
// departs. A request that does not fit is refused and does not return, so that refusals do not depend on the policy.
func simulateDay(m *machine, day []request, choose chooser) (map[int]*tally, error) {
	tallies := map[int]*tally{}
	for _, s := range sizesFor(m.gpus) {
		tallies[s] = &tally{}
	}
	type pod struct {
		set    set
		depart float64
	}
	var pods []pod
	free := m.all()
	for _, r := range day {
		pods = slices.DeleteFunc(pods, func(p pod) bool {
			if p.depart <= r.arrive {
				free |= p.set
			}
			return p.depart <= r.arrive
		})
		t := tallies[r.size]
		t.requests++
		if free.size() < r.size {
			t.refused++
			continue
		}
		chosen, err := choose(free, r.size)
		if err != nil {
			return nil, err
		}
		if chosen.size() != r.size || chosen.without(free) != 0 {
			return nil, fmt.Errorf("%s: got %v for %d of %v", m.name, chosen.indices(), r.size, free.indices())
		}
		if best := m.best[r.size]; best[free] > 0 {
			t.ofPossible += float64(m.score[chosen]) / float64(best[free])
			t.ofEmpty += float64(m.score[chosen]) / float64(best[m.all()])
		}
		free = free.without(chosen)
		pods = append(pods, pod{chosen, r.depart})
	}
	return tallies, nil
}
