package allocator

import (
	"cmp"
	"slices"
)

// Nodes of more than tableGPUs GPUs have no table. Their GPUs are clustered into a tree instead, by single linkage: the
// GPUs below one switch have the same score with those below another. The scores u(a,b) ≥ s(a,b) of that tree are the
// lowest that follow a tree. Where u = s, as on every PCIe fabric, also with islands of NVLinks in it, the best set of
// any size is made of the best sets of the clusters. Elsewhere the best score by u bounds the best by s.

// pair is two GPUs with their score.
type pair struct{ a, b, score int }

// sortedPairs returns all pairs, those with the highest score first.
func sortedPairs(score [][]int) []pair {
	var pairs []pair
	for a := range score {
		for b := range a {
			pairs = append(pairs, pair{a, b, score[a][b]})
		}
	}
	slices.SortStableFunc(pairs, func(x, y pair) int { return cmp.Compare(y.score, x.score) })
	return pairs
}

// share is the best choice of a number of GPUs in a cluster.
type share struct {
	ok    bool
	score int // by u
	cost  int // the score with all available GPUs: the lower, the better connected is what is left
	set   set
}

// searchTree returns the best set by u, or one with a higher score by s.
func (n *GPUs) searchTree(q query) found {
	x, most := n.bestByTree(q)
	score := n.scoreOf(x)
	if score < most && q.size > q.must.len() {
		x, score = n.grow(q, x, score)
	}
	cost := 0
	for _, g := range x.members() {
		cost += n.scoreWith(q.available, g)
	}
	return found{set: x, score: score, next: -1, cost: cost, exact: score == most, bound: most - score}
}

// bestByTree returns the best set by u, and its score by u. It merges the clusters with the highest score first, as
// Kruskal's algorithm does.
func (n *GPUs) bestByTree(q query) (set, int) {
	gpus := q.from.members()
	if len(gpus) == 0 {
		return set{}, 0
	}
	cluster := make([]int, len(n.list))    // of each GPU: one GPU of its cluster
	shares := make([][]share, len(n.list)) // of each cluster: those of 0, 1, 2 GPUs and so on
	for _, g := range gpus {
		one := share{ok: true, cost: n.scoreWith(q.available, g)}
		one.set.add(g)
		cluster[g], shares[g] = g, []share{{ok: !q.must.contains(g)}, one}
	}
	for _, p := range n.pairs {
		a, b := cluster[p.a], cluster[p.b]
		if a == b || !q.from.contains(p.a) || !q.from.contains(p.b) {
			continue
		}
		shares[a] = join(shares[a], shares[b], p.score, q.size)
		for _, g := range gpus {
			if cluster[g] == b {
				cluster[g] = a
			}
		}
	}
	best := shares[cluster[gpus[0]]][q.size]
	return best.set, best.score
}

// join combines the shares of two clusters, up to a size.
func join(a, b []share, score, size int) []share {
	both := make([]share, min(len(a)+len(b)-1, size+1))
	for i := range a {
		for j := 0; j < len(b) && i+j < len(both); j++ {
			if !a[i].ok || !b[j].ok {
				continue
			}
			s := share{ok: true, score: a[i].score + b[j].score + i*j*score, cost: a[i].cost + b[j].cost}
			best := &both[i+j]
			better := cmp.Or(cmp.Compare(s.score, best.score), cmp.Compare(best.cost, s.cost))
			if best.ok && better < 0 {
				continue
			}
			s.set = a[i].set.union(b[j].set)
			if !best.ok || better > 0 || s.set.before(best.set) {
				*best = s
			}
		}
	}
	return both
}

// grow returns x, or a set with a higher score that grows from a single GPU by the one that adds most. A pair is always
// the best.
func (n *GPUs) grow(q query, x set, score int) (set, int) {
	for _, first := range q.from.difference(q.must).members() {
		var grown set
		with := make([]int, len(n.list)) // the score of each GPU with the set
		add := func(g int) {
			grown.add(g)
			for other, s := range n.score[g] {
				with[other] += s
			}
		}
		for _, g := range append(q.must.members(), first) {
			add(g)
		}
		for grown.len() < q.size {
			free := q.from.difference(grown).members()
			add(slices.MaxFunc(free, func(a, b int) int { return cmp.Compare(with[a], with[b]) }))
		}
		if s := n.scoreOf(grown); s > score {
			x, score = grown, s
		}
	}
	return x, score
}
