package allocator

import (
	"cmp"
	"slices"
)

// Nodes of more than tableGPUs GPUs have no table. The scores are clustered into a tree instead.

// tree is the single-linkage clustering of the GPUs: the GPUs below one switch have the same score with those below
// another. Its scores u(a,b) ≥ s(a,b) are the lowest that follow a tree. Where u = s, as on every PCIe fabric, also
// with islands of NVLinks in it, the best set of any size is made of the best sets of the clusters. Elsewhere the best
// score by u bounds the best by s.
type tree struct {
	// merges join two clusters each, the highest score first. Cluster i < GPUs is GPU i; cluster GPUs+i is merges[i].
	merges []merge
	exact  bool // u = s
}

// merge is a cluster of two others. By u, each GPU of one has this score with each of the other.
type merge struct{ a, b, score int }

// newTree merges the pairs with the highest score first, as Kruskal's algorithm does.
func newTree(score [][]int32) tree {
	type pair struct{ a, b, score int }
	var pairs []pair
	for a := range score {
		for b := range a {
			pairs = append(pairs, pair{a, b, int(score[a][b])})
		}
	}
	slices.SortStableFunc(pairs, func(x, y pair) int { return cmp.Compare(y.score, x.score) })
	cluster := make([]int, len(score)) // of each GPU
	members := make([][]int, len(score), 2*len(score))
	for g := range cluster {
		cluster[g], members[g] = g, []int{g}
	}
	t := tree{exact: true}
	for _, p := range pairs {
		a, b := cluster[p.a], cluster[p.b]
		if a == b {
			continue
		}
		for _, x := range members[a] {
			for _, y := range members[b] {
				t.exact = t.exact && int(score[x][y]) == p.score
			}
		}
		joined := slices.Concat(members[a], members[b])
		for _, x := range joined {
			cluster[x] = len(members)
		}
		members = append(members, joined)
		t.merges = append(t.merges, merge{a, b, p.score})
	}
	return t
}

// share is the best choice of a number of GPUs in a cluster.
type share struct {
	ok    bool
	score int // by u
	taken int // the score with all available GPUs: the lower, the better connected is what is left
	set   set
}

// searchTree returns the best set by u, and its score by u.
func (n *Node) searchTree(q query) (set, int) {
	clusters := make([][]share, 0, len(n.gpus)+len(n.tree.merges)) // for each, the shares of 0, 1, 2 and so on
	for g := range n.gpus {
		shares := []share{{ok: !q.must.contains(g)}}
		if q.from.contains(g) {
			one := share{ok: true, taken: n.scoreWith(q.available, g)}
			one.set.add(g)
			shares = append(shares, one)
		}
		clusters = append(clusters, shares)
	}
	for _, m := range n.tree.merges {
		clusters = append(clusters, join(clusters[m.a], clusters[m.b], m.score, q.size))
	}
	best := clusters[len(clusters)-1][q.size]
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
			s := share{ok: true, score: a[i].score + b[j].score + i*j*score, taken: a[i].taken + b[j].taken}
			best := &both[i+j]
			if best.ok && cmp.Or(cmp.Compare(best.score, s.score), cmp.Compare(s.taken, best.taken)) > 0 {
				continue
			}
			s.set = a[i].set.union(b[j].set)
			if !best.ok || s.score != best.score || s.taken != best.taken || s.set.before(best.set) {
				*best = s
			}
		}
	}
	return both
}

// searchLarge answers a query on a large node.
func (n *Node) searchLarge(p Policy, q query) found {
	if p == NUMA {
		return n.searchLargeNUMA(q)
	}
	x, most := n.searchTree(q)
	if !n.tree.exact {
		x = n.grow(q, x)
	}
	f := found{set: x, score: n.scoreOf(x)}
	f.bound = most - f.score
	f.exact = f.bound == 0 && p != Partition
	return f
}

// grow returns x, or a set with a higher score that grows from a single GPU by the one that adds most. A pair is always
// the best.
func (n *Node) grow(q query, x set) set {
	score := n.scoreOf(x)
	for _, first := range q.from.difference(q.must).members() {
		grown := q.must
		with := make([]int, len(n.gpus)) // the score of each GPU with the set
		for g := range with {
			with[g] = n.scoreWith(grown, g)
		}
		for next := first; grown.len() < q.size; {
			grown.add(next)
			for g := range with {
				with[g] += int(n.score[g][next])
			}
			next = -1
			for _, g := range q.from.difference(grown).members() {
				if next < 0 || with[g] > with[next] {
					next = g
				}
			}
		}
		if s := n.scoreOf(grown); s > score {
			x, score = grown, s
		}
	}
	return x
}

// maxNUMASets is the most sets of NUMA nodes that a request tries.
const maxNUMASets = 32

// searchLargeNUMA tries the sets of NUMA nodes that are as small as possible.
func (n *Node) searchLargeNUMA(q query) found {
	// The NUMA nodes of what must be included are used in any case. Of the others those with most GPUs come first.
	var forced set
	var others []set
	for _, node := range n.numa {
		switch usable := node.intersection(q.from); {
		case node.intersection(q.must) != set{}:
			forced = forced.union(usable)
		case usable != set{}:
			others = append(others, usable)
		}
	}
	slices.SortStableFunc(others, func(a, b set) int { return b.len() - a.len() })
	count := 0
	for total := forced.len(); total < q.size; count++ {
		total += others[count].len()
	}
	taken := func(x set) int {
		sum := 0
		for _, g := range x.members() {
			sum += n.scoreWith(q.available, g)
		}
		return sum
	}
	best, tried, most := found{score: -1}, 0, 0
	complete := eachUnion(forced, others, count, q.size, func(from set) bool {
		if tried == maxNUMASets {
			return false
		}
		tried++
		part := q
		part.from = from
		f := n.searchLarge(Topology, part)
		most = max(most, f.score+f.bound)
		if f.score > best.score || f.score == best.score && taken(f.set) < taken(best.set) {
			best = f
		}
		return true
	})
	if !complete {
		all := n.searchLarge(Topology, q)
		most = all.score + all.bound
	}
	best.bound = most - best.score
	best.exact = best.bound == 0
	for _, node := range n.numa {
		if node.intersection(best.set) != (set{}) {
			best.nodes++
		}
	}
	return best
}

// eachUnion visits the union of base and each count of the sets that has at least size GPUs, until visit returns false,
// which it returns. The largest sets come first.
func eachUnion(base set, sets []set, count, size int, visit func(set) bool) bool {
	if count == 0 {
		return visit(base)
	}
	for i := 0; i <= len(sets)-count; i++ {
		most := base.len()
		for _, s := range sets[i : i+count] {
			most += s.len()
		}
		if most < size {
			return true
		}
		if !eachUnion(base.union(sets[i]), sets[i+1:], count-1, size, visit) {
			return false
		}
	}
	return true
}

// rankLarge makes a search for the best set a search for the best k sets. A set other than the best set x lacks a GPU
// of x. For each GPU of x, the best set without it, but with the GPUs of x before it, answers another query, and the
// best of these is the second (Murty, An Algorithm for Ranking all the Assignments in Order of Increasing Cost, 1968).
// The query of the second best set is then divided in the same way.
func rankLarge(q query, k int, search func(query) found) []found {
	type part struct {
		query
		found
	}
	parts := []part{{q, search(q)}}
	var all []found
	for len(parts) > 0 {
		best := 0
		for i := range parts {
			a, b := &parts[i].found, &parts[best].found
			if cmp.Or(cmp.Compare(a.nodes, b.nodes), cmp.Compare(b.score, a.score)) < 0 {
				best = i
			}
		}
		x := parts[best]
		parts = slices.Delete(parts, best, best+1)
		all = append(all, x.found)
		if len(all) == k {
			break
		}
		rest := x.query
		for _, g := range x.set.difference(x.must).members() {
			without := rest
			without.from.remove(g)
			if without.from.len() >= q.size {
				parts = append(parts, part{without, search(without)})
			}
			rest.must.add(g)
		}
	}
	return all
}
