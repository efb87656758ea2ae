package day

import (
	"math/rand/v2"
	"slices"
)

// The load. Times have no unit: what counts is how long a request stays against how often one comes.
const (
	// arrivals is how many requests come in a day. Each that is not refused departs, too.
	arrivals = 10_000
	// meanStay is how long a request keeps its GPUs on average, whatever its size.
	meanStay = 1.0
)

// sizes are those that requests have, each as often as the others. A machine is not asked for more GPUs than it has.
var sizes = []int{1, 2, 4, 8}

// request asks for so many GPUs at a time and keeps them until another.
type request struct {
	size        int
	come, leave float64
}

// requests is a day: Poisson arrivals and exponential stays, so that the GPUs asked for at once are on average the given
// share of the machine's. The same seed gives the same day.
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
		day[i] = request{size: fit[random.IntN(len(fit))], come: now, leave: now + stay}
	}
	return day
}

func sizesFor(gpus int) []int {
	return slices.DeleteFunc(slices.Clone(sizes), func(s int) bool { return s > gpus })
}
