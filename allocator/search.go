package allocator

import "sort"

// found is a set of GPUs that answers a query.
type found struct {
	set   set
	score int
	left  int // the score of what stays available
	exact bool
	bound int
}

// better tells whether f is better than g for Topology.
func (f *found) better(g *found) bool {
	switch {
	case f.score != g.score:
		return f.score > g.score
	case f.left != g.left:
		return f.left > g.left
	default:
		return f.set.before(&g.set)
	}
}

// rank returns the best k sets.
func (n *Node) rank(_ Policy, q query, k int) []found {
	var all []found
	free := q.available.without(q.must)
	candidates := free.places()
	var choose func(from int, s set, left int)
	choose = func(from int, s set, left int) {
		if left == 0 {
			f := found{set: s, score: n.scoreOf(s), left: n.scoreOf(q.available.without(s)), exact: true}
			i := sort.Search(len(all), func(i int) bool { return f.better(&all[i]) })
			if all = append(all, found{}); i < len(all) {
				copy(all[i+1:], all[i:])
				all[i] = f
			}
			all = all[:min(len(all), k)]
			return
		}
		for i := from; i <= len(candidates)-left; i++ {
			next := s
			next.add(candidates[i])
			choose(i+1, next, left-1)
		}
	}
	choose(0, q.must, q.size-q.must.len())
	return all
}

func (n *Node) scoreOf(s set) int {
	sum, places := 0, s.places()
	for i, a := range places {
		for _, b := range places[:i] {
			sum += int(n.score[a][b])
		}
	}
	return sum
}
