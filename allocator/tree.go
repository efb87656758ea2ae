package allocator

import (
	"cmp"
	"slices"
)

// tree is the hierarchy that the scores follow where GPUs hang on one: two GPUs under one switch are all alike to those
// under another. It is the single-linkage clustering of the GPUs, whose scores u(a,b) ≥ s(a,b) are the least that have that
// property. Where u = s, as on every PCIe fabric and where NVLink islands lie in it, the best set of any size follows
// from the best sets of the parts; elsewhere the best by u is a bound on the best by s.
type tree struct {
	// merges join two clusters each, nearest first. Cluster i < GPUs is GPU i; cluster GPUs+i is merges[i].
	merges []merge
	// exact tells that u = s.
	exact bool
}

// merge is a cluster made of two, all of whose GPUs score the same with those of the other.
type merge struct{ a, b, score int }

// fillTree joins the nearest pairs first, as Kruskal does.
func (n *Node) fillTree() {
	type pair struct{ a, b, score int }
	var pairs []pair
	for a := range n.gpus {
		for b := range a {
			pairs = append(pairs, pair{a, b, int(n.score[a][b])})
		}
	}
	slices.SortStableFunc(pairs, func(x, y pair) int { return cmp.Compare(y.score, x.score) })
	cluster := make([]int, len(n.gpus)) // of each GPU
	members := make([][]int, len(n.gpus), 2*len(n.gpus))
	for g := range cluster {
		cluster[g], members[g] = g, []int{g}
	}
	n.tree.exact = true
	for _, p := range pairs {
		a, b := cluster[p.a], cluster[p.b]
		if a == b {
			continue
		}
		for _, x := range members[a] {
			for _, y := range members[b] {
				n.tree.exact = n.tree.exact && int(n.score[x][y]) == p.score
			}
		}
		joined := slices.Concat(members[a], members[b])
		for _, x := range joined {
			cluster[x] = len(members)
		}
		members = append(members, joined)
		n.tree.merges = append(n.tree.merges, merge{a, b, p.score})
	}
}

// share is the best choice of some number of GPUs of a cluster.
type share struct {
	ok    bool
	score int // by u
	taken int // what the chosen score with all that is available: the less, the better connected is what stays
	set   set
}

func (s *share) better(t *share) bool {
	switch {
	case !t.ok:
		return true
	case s.score != t.score:
		return s.score > t.score
	case s.taken != t.taken:
		return s.taken < t.taken
	default:
		return s.set.before(t.set)
	}
}

// searchTree is the best set by u, and its score by u.
func (n *Node) searchTree(q query) (set, int) {
	clusters := make([][]share, 0, len(n.gpus)+len(n.tree.merges))
	available := q.available.places()
	for g := range n.gpus {
		clusters = append(clusters, n.leaf(q, available, g))
	}
	for _, m := range n.tree.merges {
		clusters = append(clusters, join(clusters[m.a], clusters[m.b], m.score, q.size))
	}
	best := clusters[len(clusters)-1][q.size]
	return best.set, best.score
}

// leaf has the two ways to choose of one GPU: shares of 0 and 1.
func (n *Node) leaf(q query, available []int, g int) []share {
	if !q.from.has(g) {
		return []share{{ok: true}}
	}
	one := share{ok: true}
	one.set.add(g)
	for _, other := range available {
		one.taken += int(n.score[g][other])
	}
	return []share{{ok: !q.must.has(g)}, one}
}

// join combines the shares of two clusters, up to size.
func join(a, b []share, score, size int) []share {
	both := make([]share, min(len(a)+len(b)-1, size+1))
	for i := range a {
		for j := 0; j < len(b) && i+j < len(both); j++ {
			if !a[i].ok || !b[j].ok {
				continue
			}
			s := share{ok: true, score: a[i].score + b[j].score + i*j*score, taken: a[i].taken + b[j].taken}
			if t := &both[i+j]; t.ok && (s.score < t.score || s.score == t.score && s.taken > t.taken) {
				continue
			}
			s.set = a[i].set.with(b[j].set)
			if s.better(&both[i+j]) {
				both[i+j] = s
			}
		}
	}
	return both
}
