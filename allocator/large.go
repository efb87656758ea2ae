package allocator

import "slices"

// maxSteps is the most sets that a request looks into where scores follow no tree: some 2 ms of 128 GPUs.
const maxSteps = 2000

// topology is the answer to Topology where there are too many GPUs for a table: the best of the tree; where that only
// bounds the best, a search goes on from it, and takes from the steps that are left.
func (n *Node) topology(q query, steps *int) found {
	x, most := n.searchTree(q)
	if n.tree.exact {
		return found{set: x, score: most, exact: true}
	}
	s := n.newBranching(q, x)
	s.steps = *steps
	s.start(q)
	*steps = s.steps
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
	nearest [][]int
	most    []int  // see bound
	stack   []free // what the searches under way look at
}

// free is a GPU that may be taken, with its score with those that were.
type free struct{ gpu, score int }

func (n *Node) newBranching(q query, start set) *branching {
	s := &branching{node: n, nearest: make([][]int, len(n.gpus)), most: make([]int, q.size)}
	s.best, s.score = n.improve(q, start)
	from := q.from.places()
	row := make([]int, 0, len(from))
	for _, g := range from {
		row = row[:0]
		for _, other := range from {
			if other != g {
				row = append(row, int(n.score[g][other]))
			}
		}
		slices.SortFunc(row, func(a, b int) int { return b - a })
		sums := make([]int, q.size)
		for i := range min(len(row), q.size-1) {
			sums[i+1] = sums[i] + row[i]
		}
		s.nearest[g] = sums
	}
	return s
}

// improve swaps one GPU at a time for a better one for as long as there is one.
func (n *Node) improve(q query, x set) (set, int) {
	with := make([]int, len(n.gpus)) // the score of each GPU with x
	for g := range with {
		with[g] = n.with(x, g)
	}
	for {
		out, in, gain := 0, 0, 0
		others := q.from.without(x).places()
		for _, a := range x.without(q.must).places() {
			for _, b := range others {
				if g := with[b] - int(n.score[a][b]) - with[a]; g > gain {
					out, in, gain = a, b, g
				}
			}
		}
		if gain == 0 {
			return x, n.scoreOf(x)
		}
		x.remove(out)
		x.add(in)
		for g := range with {
			with[g] += int(n.score[g][in]) - int(n.score[g][out])
		}
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

// start looks at every set that the query allows.
func (s *branching) start(q query) {
	var all []free
	for _, g := range q.from.without(q.must).places() {
		all = append(all, free{g, s.node.with(q.must, g)})
	}
	s.search(q.must, s.node.scoreOf(q.must), all, q.size-q.must.len())
}

// search looks at the sets of those taken, which have that score, and left more of those that are free.
func (s *branching) search(taken set, score int, all []free, left int) {
	if left == 0 {
		if score > s.score {
			s.best, s.score = taken, score
		}
		return
	}
	if len(all) < left {
		return
	}
	first, most := s.bound(all, left)
	most += score
	if most <= s.score {
		return
	}
	if s.steps == 0 {
		s.open = max(s.open, most)
		return
	}
	s.steps--
	kept := len(s.stack)
	row := s.node.score[first.gpu]
	for _, f := range all {
		if f.gpu != first.gpu {
			s.stack = append(s.stack, free{f.gpu, f.score + int(row[f.gpu])})
		}
	}
	with := taken
	with.add(first.gpu)
	s.search(with, score+first.score, s.stack[kept:], left-1)
	// A set without the first but with another that is just like it is no better than one with the first.
	s.stack = s.stack[:kept]
	for _, f := range all {
		if s.node.kind[f.gpu] != s.node.kind[first.gpu] {
			s.stack = append(s.stack, f)
		}
	}
	s.search(taken, score, s.stack[kept:], left)
	s.stack = s.stack[:kept]
}

// bound is the most that left of the GPUs can add, and the one that can add most. Twice what one can add is its score with
// those taken, which is its own, and half of its score with those that follow, which it has in common with them.
func (s *branching) bound(all []free, left int) (free, int) {
	first, sum := all[0], 0
	most := s.most[:left] // the highest, in order
	clear(most)
	for _, f := range all {
		adds := 2*f.score + s.nearest[f.gpu][left-1]
		if adds > most[0] {
			first = f
		}
		if adds <= most[left-1] {
			continue
		}
		i := left - 1
		for ; i > 0 && most[i-1] < adds; i-- {
			most[i] = most[i-1]
		}
		most[i] = adds
	}
	for _, adds := range most {
		sum += adds
	}
	return first, sum / 2
}

// fillKinds numbers the GPUs, those alike that score the same with every other: a search needs to leave out only one of
// them.
func (n *Node) fillKinds() {
	n.kind = make([]int, len(n.gpus))
	for a := range n.gpus {
		n.kind[a] = a
		for b := range a {
			if n.alike(a, b) {
				n.kind[a] = n.kind[b]
				break
			}
		}
	}
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

func without(gpus []int, leave func(int) bool) []int {
	return slices.DeleteFunc(slices.Clone(gpus), leave)
}
