package allocator

import "slices"

// maxSteps is the most sets that a search looks into where scores follow no tree.
const maxSteps = 2000

// topology is the answer to Topology where there are too many GPUs for a table: the best of the tree; where that only
// bounds the best, a search goes on from it.
func (n *Node) topology(q query) found {
	x, most := n.searchTree(q)
	if n.tree.exact {
		return found{set: x, score: most, exact: true}
	}
	s := n.newBranching(q, x)
	s.search(q.must, q.from.without(q.must).places(), q.size-q.must.len())
	bound := max(min(most, s.open)-s.score, 0)
	return found{set: s.best, score: s.score, exact: bound == 0, bound: bound}
}

// branching is a search by branch and bound: a GPU is taken or left out, and what cannot become better is not looked into.
type branching struct {
	node  *Node
	steps int // that may still be taken
	best  set
	score int // of best
	open  int // the most that a set can score which was not looked into
	// nearest[g][i] is the score of GPU g with the i that are nearest to it.
	nearest map[int][]int
}

func (n *Node) newBranching(q query, start set) *branching {
	s := &branching{node: n, steps: maxSteps, nearest: map[int][]int{}}
	s.best, s.score = n.improve(q, start)
	from := q.from.places()
	for _, g := range from {
		row := make([]int, 0, len(from))
		for _, other := range from {
			if other != g {
				row = append(row, int(n.score[g][other]))
			}
		}
		slices.SortFunc(row, func(a, b int) int { return b - a })
		sums := make([]int, 1, len(row)+1)
		for i, score := range row {
			sums = append(sums, sums[i]+score)
		}
		s.nearest[g] = sums
	}
	return s
}

// improve swaps one GPU at a time for a better one for as long as there is one.
func (n *Node) improve(q query, x set) (set, int) {
	for {
		out, in, gain := 0, 0, 0
		for _, a := range x.without(q.must).places() {
			less := n.with(x, a)
			for _, b := range q.from.without(x).places() {
				if g := n.with(x, b) - int(n.score[a][b]) - less; g > gain {
					out, in, gain = a, b, g
				}
			}
		}
		if gain == 0 {
			return x, n.scoreOf(x)
		}
		x.remove(out)
		x.add(in)
	}
}

// with is what GPU g scores with the set.
func (n *Node) with(x set, g int) int {
	sum := 0
	for _, other := range x.places() {
		sum += int(n.score[g][other])
	}
	return sum
}

func (n *Node) scoreOf(x set) int {
	sum := 0
	for _, g := range x.places() {
		sum += n.with(x, g)
	}
	return sum / 2
}

// option is a GPU that may be taken, and twice what it can add: its score with those taken, which is its own, and half of
// its score with those that follow, which it has in common with them.
type option struct{ gpu, most int }

// search looks at the sets of those taken and left more of free.
func (s *branching) search(taken set, free []int, left int) {
	score := s.node.scoreOf(taken)
	if left == 0 {
		if score > s.score {
			s.best, s.score = taken, score
		}
		return
	}
	if len(free) < left {
		return
	}
	options := make([]option, len(free))
	for i, g := range free {
		options[i] = option{g, 2*s.node.with(taken, g) + s.nearest[g][left-1]}
	}
	slices.SortStableFunc(options, func(a, b option) int { return b.most - a.most })
	most := 0
	for _, o := range options[:left] {
		most += o.most
	}
	most = score + most/2
	if most <= s.score {
		return
	}
	if s.steps == 0 {
		s.open = max(s.open, most)
		return
	}
	s.steps--
	first := options[0].gpu
	with := taken
	with.add(first)
	s.search(with, without(free, func(g int) bool { return g == first }), left-1)
	// A set without the first but with another that is just like it is no better than one with the first.
	s.search(taken, without(free, func(g int) bool { return g == first || s.node.alike(g, first) }), left)
}

func without(gpus []int, leave func(int) bool) []int {
	return slices.DeleteFunc(slices.Clone(gpus), leave)
}

// alike tells that two GPUs score the same with every other.
func (n *Node) alike(a, b int) bool {
	for g := range n.gpus {
		if g != a && g != b && n.score[a][g] != n.score[b][g] {
			return false
		}
	}
	return true
}
