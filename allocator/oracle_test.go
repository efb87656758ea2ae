package allocator

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"pgregory.net/rapid"

	"gpu-cdi-plugin/gpu"
)

// The oracle answers by trying everything, from the formulas in policy.go. It shares nothing with the code under test but
// the matrix.
type oracle struct {
	score [][]int
	numa  []int
}

// problem is a request on GPUs by their places.
type problem struct {
	available, must []int
	size            int
}

func (o *oracle) sum(x []int) int {
	sum := 0
	for i := range x {
		for _, b := range x[:i] {
			sum += o.score[x[i]][b]
		}
	}
	return sum
}

// subsets of a size, each sorted if the list is.
func subsets(of []int, size int) [][]int {
	if size == 0 {
		return [][]int{nil}
	}
	var all [][]int
	for i := 0; i+size <= len(of); i++ {
		for _, rest := range subsets(of[i+1:], size-1) {
			all = append(all, append([]int{of[i]}, rest...))
		}
	}
	return all
}

func minus(a, b []int) []int {
	return slices.DeleteFunc(slices.Clone(a), func(g int) bool { return slices.Contains(b, g) })
}

// candidates are the sets that fulfil the request.
func (p *problem) candidates() [][]int {
	all := subsets(minus(p.available, p.must), p.size-len(p.must))
	for i := range all {
		all[i] = slices.Sorted(slices.Values(slices.Concat(all[i], p.must)))
	}
	return all
}

func (o *oracle) bestOf(of []int, size int) int {
	best := 0
	for _, x := range subsets(of, size) {
		best = max(best, o.sum(x))
	}
	return best
}

// next is what the next requests could get of x.
func (o *oracle) next(x []int) int { return o.pairs(x) + o.bestOf(x, 4) + o.bestOf(x, 8) }

// pairs is the most that disjoint pairs of x score: one that has the first GPU and the pairs of the others, or those alone.
func (o *oracle) pairs(x []int) int {
	if len(x) < 2 {
		return 0
	}
	most := o.pairs(x[1:])
	for _, other := range x[1:] {
		most = max(most, o.score[x[0]][other]+o.pairs(minus(x[1:], []int{other})))
	}
	return most
}

func (o *oracle) nodes(x []int) int {
	seen := map[int]bool{}
	for _, g := range x {
		seen[o.numa[g]] = true
	}
	return len(seen)
}

// topology is the best set among those on fewest NUMA nodes, if they count.
func (o *oracle) topology(p problem, numa bool) []int {
	var best []int
	for _, x := range p.candidates() {
		if best == nil || o.compare(p, numa, x, best) < 0 {
			best = x
		}
	}
	return best
}

func (o *oracle) compare(p problem, numa bool, a, b []int) int {
	if numa && o.nodes(a) != o.nodes(b) {
		return o.nodes(a) - o.nodes(b)
	}
	if d := o.sum(b) - o.sum(a); d != 0 {
		return d
	}
	restA, restB := minus(p.available, a), minus(p.available, b)
	if d := o.next(restB) - o.next(restA); d != 0 {
		return d
	}
	if d := o.sum(restB) - o.sum(restA); d != 0 {
		return d
	}
	return slices.Compare(a, b)
}

// partition is the set of the best partition, as go-gpuallocator enumerates them: depth first, the lowest GPU with each
// choice of others in order.
func (o *oracle) partition(p problem) []int {
	most, best := -1, [][]int(nil)
	var split func(left []int, sum int, sets [][]int)
	split = func(left []int, sum int, sets [][]int) {
		if len(left) == 0 {
			if sum > most && slices.ContainsFunc(sets, p.fulfils) {
				most, best = sum, slices.Clone(sets)
			}
			return
		}
		sizes := []int{p.size}
		if over := len(left) % p.size; over != 0 {
			sizes = append(sizes, over)
		}
		var firsts [][]int
		for _, size := range sizes {
			for _, rest := range subsets(left[1:], size-1) {
				firsts = append(firsts, append([]int{left[0]}, rest...))
			}
		}
		slices.SortStableFunc(firsts, padded)
		for _, first := range firsts {
			split(minus(left, first), sum+o.sum(first), append(slices.Clone(sets), first))
		}
	}
	split(p.available, 0, nil)
	var set []int
	for _, s := range best {
		if p.fulfils(s) && (set == nil || o.sum(s) > o.sum(set)) {
			set = s
		}
	}
	return set
}

// padded compares sets as if the shorter one were filled up with GPUs after all others.
func padded(a, b []int) int {
	n := min(len(a), len(b))
	if d := slices.Compare(a[:n], b[:n]); d != 0 {
		return d
	}
	return len(b) - len(a)
}

func (p *problem) fulfils(x []int) bool {
	return len(x) == p.size && len(minus(p.must, x)) == 0
}

// node is the node of the oracle.
func (o *oracle) node() *Node {
	gpus := make([]GPU, len(o.score))
	for g := range gpus {
		gpus[g] = GPU{UUID: fmt.Sprintf("GPU-%d", g), Index: g, NUMANode: o.numa[g]}
	}
	n, err := NewNodeFromMatrix(gpus, o.score)
	if err != nil {
		panic(err)
	}
	return n
}

// oracleOf has the scores of a node.
func oracleOf(n *Node) *oracle {
	o := &oracle{}
	for a := range n.gpus {
		row := make([]int, len(n.gpus))
		for b := range row {
			row[b] = n.Pair(a, b)
		}
		o.score, o.numa = append(o.score, row), append(o.numa, n.gpus[a].NUMANode)
	}
	return o
}

// upTo draws from least to most, and most more often than less: rapid prefers low numbers.
func upTo(t *rapid.T, least, most int, what string) int {
	return most - rapid.IntRange(0, most-least).Draw(t, what)
}

// drawMatrix draws scores of few kinds, so that many sets are equal, or of many. Each is as likely as another.
func drawMatrix(t *rapid.T, n int) *oracle {
	kinds := rapid.SampledFrom([]int{2, 3, 6, 2000}).Draw(t, "kinds of links")
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "links"), 0))
	o := randomOracle(rng, n, kinds)
	for a := range n {
		o.numa[a] = gpu.NoNUMANode + rng.IntN(5)
	}
	return o
}

// randomOracle has scores of so many kinds.
func randomOracle(rng *rand.Rand, gpus, kinds int) *oracle {
	o := &oracle{score: square[int](gpus), numa: make([]int, gpus)}
	for a := range gpus {
		for b := range a {
			s := rng.IntN(kinds)
			o.score[a][b], o.score[b][a] = s, s
		}
	}
	return o
}

// drawProblem draws what is available and must be included, and every size that can be asked for.
func drawProblem(t *rapid.T, n int) problem {
	order := rapid.Permutation(places(n)).Draw(t, "order")
	p := problem{available: order[:upTo(t, 0, n, "available")]}
	p.must = slices.Clone(p.available[:rapid.IntRange(0, len(p.available)).Draw(t, "included")])
	if rapid.Bool().Draw(t, "nothing included") {
		p.must = nil
	}
	p.size = rapid.IntRange(len(p.must), len(p.available)).Draw(t, "size")
	if rapid.Bool().Draw(t, "many") {
		p.size = len(p.available) + len(p.must) - p.size
	}
	slices.Sort(p.available)
	slices.Sort(p.must)
	return p
}

func (p *problem) request(n *Node) Request {
	return Request{Available: uuids(n, p.available...), Must: uuids(n, p.must...), Size: p.size}
}
