package allocator

import "math/bits"

// oracle knows what a set of GPUs is worth to the objective of NVIDIA's policy, by looking at every set there is. Sets have
// a bit for each GPU.
type oracle struct {
	size  int
	worth []int       // the score of each set
	split map[int]int // the highest sum of a set's partitions into sets of size, if it can be divided so
}

func newOracle(gpus, size int, score func(a, b int) int) *oracle {
	o := &oracle{size: size, worth: make([]int, 1<<gpus), split: map[int]int{0: 0}}
	for set := 1; set < len(o.worth); set++ {
		first, rest := bits.TrailingZeros(uint(set)), set&(set-1)
		o.worth[set] = o.worth[rest]
		for r := rest; r != 0; r &= r - 1 {
			o.worth[set] += score(first, bits.TrailingZeros(uint(r)))
		}
	}
	return o
}

// total is the highest sum of all partitions of the available GPUs of which chosen is a set: the others have the same
// size, but for one that has what is left.
func (o *oracle) total(available, chosen int) int {
	others := available &^ chosen
	left := bits.OnesCount(uint(others)) % o.size
	if left == 0 {
		return o.worth[chosen] + o.whole(others)
	}
	best := 0
	for set := range subsets(others, left) {
		best = max(best, o.worth[set]+o.whole(others&^set))
	}
	return o.worth[chosen] + best
}

// whole divides all of a set into sets of the size. The first GPU is in one of them.
func (o *oracle) whole(set int) int {
	if sum, ok := o.split[set]; ok {
		return sum
	}
	best := 0
	first := set & -set
	for others := range subsets(set&^first, o.size-1) {
		best = max(best, o.worth[first|others]+o.whole(set&^first&^others))
	}
	o.split[set] = best
	return best
}

// subsets are the subsets with so many GPUs.
func subsets(set, size int) func(func(int) bool) {
	return func(yield func(int) bool) {
		for sub := set; ; sub = (sub - 1) & set {
			if bits.OnesCount(uint(sub)) == size && !yield(sub) {
				return
			}
			if sub == 0 {
				return
			}
		}
	}
}
