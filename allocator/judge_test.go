package allocator

import (
	"math/bits"
	"slices"
)

// judge is the oracle for 16 GPUs: it looks at every subset, but remembers what it found. Sets have a bit for each GPU.
type judge struct {
	oracle *oracle
	score  []int
	left   map[int]int // what the next requests could get of a set
	paired map[int]int // the most that disjoint pairs of a set score
}

func newJudge(o *oracle) *judge {
	j := &judge{oracle: o, score: make([]int, 1<<len(o.score)), left: map[int]int{}, paired: map[int]int{0: 0}}
	for x := range j.score {
		j.score[x] = o.sum(placesOf(x))
	}
	return j
}

func (j *judge) best(available, must, size int) int {
	best := -1
	for x := available; ; x = (x - 1) & available {
		if x&must == must && bits.OnesCount(uint(x)) == size && (best < 0 || j.better(available, x, best)) {
			best = x
		}
		if x == 0 {
			return best
		}
	}
}

func (j *judge) better(available, a, b int) bool {
	if j.score[a] != j.score[b] {
		return j.score[a] > j.score[b]
	}
	restA, restB := available&^a, available&^b
	if nextA, nextB := j.next(restA), j.next(restB); nextA != nextB {
		return nextA > nextB
	}
	if j.score[restA] != j.score[restB] {
		return j.score[restA] > j.score[restB]
	}
	return slices.Compare(placesOf(a), placesOf(b)) < 0
}

func (j *judge) next(set int) int {
	if left, ok := j.left[set]; ok {
		return left
	}
	var four, eight int
	for x := set; x > 0; x = (x - 1) & set {
		switch bits.OnesCount(uint(x)) {
		case 4:
			four = max(four, j.score[x])
		case 8:
			eight = max(eight, j.score[x])
		}
	}
	j.left[set] = j.pairs(set) + four + eight
	return j.left[set]
}

// pairs leaves the highest GPU out, or pairs it with each other.
func (j *judge) pairs(set int) int {
	if most, ok := j.paired[set]; ok {
		return most
	}
	g := bits.Len(uint(set)) - 1
	rest := set &^ (1 << g)
	most := j.pairs(rest)
	for _, other := range placesOf(rest) {
		most = max(most, j.oracle.score[g][other]+j.pairs(rest&^(1<<other)))
	}
	j.paired[set] = most
	return most
}

func bitsOf(places []int) int {
	set := 0
	for _, g := range places {
		set |= 1 << g
	}
	return set
}

func placesOf(set int) []int {
	var places []int
	for g := range bits.Len(uint(set)) {
		if set>>g&1 == 1 {
			places = append(places, g)
		}
	}
	return places
}
