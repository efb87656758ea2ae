package allocator

// query is a request in terms of a node's GPUs: size of from are wanted, must included. The others of available are not
// to be chosen, but count as what stays available. must ⊆ from ⊆ available.
type query struct {
	available, from, must set
	size                  int
}

// found is a set of GPUs that answers a query.
type found struct {
	set   set
	nodes int // NUMA nodes, if they count
	score int
	exact bool
	bound int // how much higher the score of another set can be at most
}

// before tells that f is better than g, whatever stays.
func (f *found) before(g *found) bool {
	return f.nodes < g.nodes || f.nodes == g.nodes && f.score > g.score
}

// rank returns the best k sets of GPUs, best first. There is always one: the query was checked.
func (n *Node) rank(p Policy, q query, k int) []found {
	key := question{policy: p, query: q, k: k}
	if all := n.cache.get(key); all != nil {
		return all
	}
	all := n.search(p, q, k)
	n.cache.put(key, all)
	return all
}

func (n *Node) search(p Policy, q query, k int) []found {
	switch {
	case n.table == nil && q.available.len() <= tableGPUs && (p == Partition || !n.tree.exact):
		return n.searchPart(p, q, k)
	case n.table == nil:
		return runnersUp(q, k, func(q query) found { return n.searchLarge(p, q) })
	case p == Partition:
		return n.partition(q, k)
	case p == NUMA:
		return n.searchTable(q, n.numa, k)
	default:
		return n.searchTable(q, nil, k)
	}
}

// searchLarge answers where there are too many GPUs for a table.
func (n *Node) searchLarge(p Policy, q query) found {
	steps := maxSteps
	if p == NUMA {
		return n.fewestNUMANodes(q, &steps)
	}
	f := n.topology(q, &steps)
	f.exact = f.exact && p != Partition
	return f
}

// searchPart searches a node that has only the available GPUs.
func (n *Node) searchPart(p Policy, q query, k int) []found {
	places := q.available.places()
	part := n.part(places)
	all := part.search(p, query{
		available: q.available.compress(places),
		from:      q.from.compress(places),
		must:      q.must.compress(places),
		size:      q.size,
	}, k)
	for i := range all {
		all[i].set = all[i].set.expand(places)
	}
	return all
}

// runnersUp makes a search for the best set into one for the best k. Whatever is not the best set x lacks one of its GPUs:
// for each, the best set without it and with those of x before it is the answer to another query; the best of these is the
// second (Murty, An Algorithm for Ranking all the Assignments in Order of Increasing Cost, 1968). A query has the best
// answer of its part, so the parts go on to be divided where the next best was found.
func runnersUp(q query, k int, search func(query) found) []found {
	type part struct {
		query
		found
	}
	parts := []part{{q, search(q)}}
	var all []found
	for {
		best := 0
		for i := range parts {
			if parts[i].before(&parts[best].found) {
				best = i
			}
		}
		x := parts[best]
		parts = append(parts[:best], parts[best+1:]...)
		all = append(all, x.found)
		if len(all) == k {
			return all
		}
		rest := x.query
		for _, g := range x.set.without(x.must).places() {
			without := rest
			without.from.remove(g)
			if without.from.len() >= q.size {
				parts = append(parts, part{without, search(without)})
			}
			rest.must.add(g)
		}
		if len(parts) == 0 {
			return all
		}
	}
}
