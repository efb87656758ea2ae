package allocator

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"

	"pgregory.net/rapid"

	"gpu-cdi-plugin/gpu"
)

// oracle answers requests by trying every set, by the formulas in policy.go.
type oracle struct {
	score [][]int
	numa  []int // the NUMA node of each GPU
}

// newOracle has GPUs that all score 0 with each other and are on NUMA node 0.
func newOracle(gpus int) *oracle {
	o := &oracle{score: make([][]int, gpus), numa: make([]int, gpus)}
	for i := range o.score {
		o.score[i] = make([]int, gpus)
	}
	return o
}

// withScores sets the score of each pair, and returns the oracle.
func (o *oracle) withScores(score func(a, b int) int) *oracle {
	for a := range o.score {
		for b := range a {
			o.score[a][b] = score(a, b)
			o.score[b][a] = o.score[a][b]
		}
	}
	return o
}

// problem is a request with GPUs by index.
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

// subsets returns the subsets of a size, in the order of the list.
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

// candidates returns the sets that fulfil the request.
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

// next is L in Topology.
func (o *oracle) next(x []int) int { return o.pairs(x) + o.bestOf(x, 4) + o.bestOf(x, 8) }

// pairs returns the highest score of disjoint pairs of x: one with the first GPU and those of the others, or only
// those.
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

// topology returns the best set by Topology, or by NUMA.
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

// partition returns the best set by Partition. It enumerates partitions as go-gpuallocator does: depth first, the
// lowest GPU with each choice of others in order.
func (o *oracle) partition(p problem) []int {
	if p.size == 0 {
		return nil
	}
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
		slices.SortStableFunc(firsts, comparePadded)
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

// comparePadded compares sets as if the shorter one were filled up with GPUs after all others.
func comparePadded(a, b []int) int {
	n := min(len(a), len(b))
	if d := slices.Compare(a[:n], b[:n]); d != 0 {
		return d
	}
	return len(b) - len(a)
}

func (p *problem) fulfils(x []int) bool {
	return len(x) == p.size && len(minus(p.must, x)) == 0
}

// allIndices returns the indices of n GPUs.
func allIndices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// node returns a node with the oracle's scores.
func (o *oracle) node() *GPUs {
	gpus, score := make([]usableGPU, len(o.score)), newMatrix(len(o.score))
	for a := range gpus {
		gpus[a] = usableGPU{fmt.Sprintf("GPU-%d", a), o.numa[a]}
		copy(score[a], o.score[a])
	}
	return newGPUs(gpus, score)
}

// oracleOf returns an oracle with a node's scores.
func oracleOf(n *GPUs) *oracle {
	o := newOracle(len(n.list)).withScores(n.Pair)
	for g := range n.list {
		o.numa[g] = n.list[g].numaNode
	}
	return o
}

// upTo draws a number. Unlike rapid it prefers high ones.
func upTo(t *rapid.T, least, most int, what string) int {
	return most - rapid.IntRange(0, most-least).Draw(t, what)
}

// drawOracle draws scores with few different values, so that many sets are equal, or with many.
func drawOracle(t *rapid.T, n int) *oracle {
	kinds := rapid.SampledFrom([]int{2, 3, 6, 2000}).Draw(t, "different scores")
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "links"), 0))
	o := randomOracle(rng, n, kinds)
	for a := range n {
		o.numa[a] = gpu.NoNUMANode + rng.IntN(5)
	}
	return o
}

// randomOracle has random scores with that many different values.
func randomOracle(rng *rand.Rand, gpus, kinds int) *oracle {
	return newOracle(gpus).withScores(func(a, b int) int { return rng.IntN(kinds) })
}

// drawProblem draws a request that has an answer.
func drawProblem(t *rapid.T, n int) problem {
	order := rapid.Permutation(allIndices(n)).Draw(t, "order")
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

func (p *problem) request(n *GPUs) Request {
	return Request{Available: uuids(n, p.available...), Must: uuids(n, p.must...), Size: p.size}
}

// bitOracle is an oracle for 16 GPUs: it tries every set too, but retains intermediate results. Sets have a bit for
// each GPU.
type bitOracle struct {
	oracle *oracle
	score  []int
	nexts  map[int]int // next of each set
	paired map[int]int // the highest score of disjoint pairs of each set
}

func newBitOracle(o *oracle) *bitOracle {
	bo := &bitOracle{oracle: o, score: make([]int, 1<<len(o.score)), nexts: map[int]int{}, paired: map[int]int{0: 0}}
	for x := range bo.score {
		bo.score[x] = o.sum(indicesOf(x))
	}
	return bo
}

func (o *bitOracle) best(available, must, size int) int {
	best := -1
	for x := available; ; x = (x - 1) & available {
		if x&must == must && bits.OnesCount(uint(x)) == size && (best < 0 || o.better(available, x, best)) {
			best = x
		}
		if x == 0 {
			return best
		}
	}
}

func (o *bitOracle) better(available, a, b int) bool {
	if o.score[a] != o.score[b] {
		return o.score[a] > o.score[b]
	}
	restA, restB := available&^a, available&^b
	if nextA, nextB := o.next(restA), o.next(restB); nextA != nextB {
		return nextA > nextB
	}
	if o.score[restA] != o.score[restB] {
		return o.score[restA] > o.score[restB]
	}
	return slices.Compare(indicesOf(a), indicesOf(b)) < 0
}

func (o *bitOracle) next(set int) int {
	if next, ok := o.nexts[set]; ok {
		return next
	}
	var four, eight int
	for x := set; x > 0; x = (x - 1) & set {
		switch bits.OnesCount(uint(x)) {
		case 4:
			four = max(four, o.score[x])
		case 8:
			eight = max(eight, o.score[x])
		}
	}
	o.nexts[set] = o.pairs(set) + four + eight
	return o.nexts[set]
}

// pairs pairs the highest GPU with each other one, or leaves it out.
func (o *bitOracle) pairs(set int) int {
	if most, ok := o.paired[set]; ok {
		return most
	}
	g := bits.Len(uint(set)) - 1
	rest := set &^ (1 << g)
	most := o.pairs(rest)
	for _, other := range indicesOf(rest) {
		most = max(most, o.oracle.score[g][other]+o.pairs(rest&^(1<<other)))
	}
	o.paired[set] = most
	return most
}

func bitsOf(gpus []int) int {
	set := 0
	for _, g := range gpus {
		set |= 1 << g
	}
	return set
}

func indicesOf(set int) []int {
	var gpus []int
	for g := range bits.Len(uint(set)) {
		if set>>g&1 == 1 {
			gpus = append(gpus, g)
		}
	}
	return gpus
}
