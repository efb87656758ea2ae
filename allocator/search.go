package allocator

import (
	"cmp"
	"slices"
)

// query is a request by the GPUs of a node: size GPUs of from, with all of must. What is available but not in from
// cannot be chosen, and counts as left for the next requests. must ⊆ from ⊆ available.
type query struct {
	available, from, must set
	size                  int
}

// found is a set of GPUs that answers a query.
type found struct {
	set       set
	numaNodes int // the number of NUMA nodes, if it counts
	score     int
	next      int // L in Topology of what is left, or -1 on nodes without a table
	cost      int // the score with all available GPUs: the lower, the better connected is what is left
	exact     bool
	bound     int // see Choice
}

// compare is negative if a is better. No two sets are equal.
func (a *found) compare(b *found) int {
	c := cmp.Or(
		cmp.Compare(a.numaNodes, b.numaNodes), cmp.Compare(b.score, a.score), cmp.Compare(b.next, a.next),
		cmp.Compare(a.cost, b.cost),
	)
	switch {
	case c != 0 || a.set == b.set:
		return c
	case a.set.before(b.set):
		return -1
	default:
		return 1
	}
}

// rank returns the best k sets of GPUs, best first, or all if there are fewer. There is at least one: the request is
// valid.
//
// A set other than the best set x lacks a GPU of x. For each GPU of x, the best set without it, but with the GPUs of x
// before it, answers another query, and the best of these is the second (Murty, An Algorithm for Ranking all the
// Assignments in Order of Increasing Cost, 1968). The query of the second best set is then divided in the same way.
func (n *GPUs) rank(p Policy, q query, k int) []found {
	if p == Partition && n.table != nil {
		return n.table.searchPartitions(q, k)
	}
	type part struct {
		query
		found
	}
	parts := []part{{q, n.search(p, q)}}
	var all []found
	for len(parts) > 0 {
		best := 0
		for i := range parts {
			if parts[i].compare(&parts[best].found) < 0 {
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
				parts = append(parts, part{without, n.search(p, without)})
			}
			rest.must.add(g)
		}
	}
	return all
}

// search returns the best set of GPUs by a policy. Partition is Topology here.
func (n *GPUs) search(p Policy, q query) found {
	switch {
	case p == NUMA:
		return n.searchNUMA(q)
	case n.table != nil:
		return n.table.search(q)
	default:
		f := n.searchTree(q)
		f.exact = f.exact && p != Partition
		return f
	}
}

// maxNUMASets is the most sets of NUMA nodes that a request tries on a node without a table. The number is arbitrary:
// each set costs a search of the tree, so it bounds the time. What it leaves out is in Choice.Bound.
const maxNUMASets = 32

// searchNUMA tries the sets of NUMA nodes that are as small as possible.
func (n *GPUs) searchNUMA(q query) found {
	// The NUMA nodes of what must be included are used in any case. Of the others those with most GPUs come first.
	var forced set
	var others []set
	numaNodes := 0
	for _, node := range n.numa {
		switch usable := node.intersection(q.from); {
		case node.intersection(q.must) != set{}:
			forced = forced.union(usable)
			numaNodes++
		case usable != set{}:
			others = append(others, usable)
		}
	}
	slices.SortStableFunc(others, func(a, b set) int { return b.len() - a.len() })
	count := 0
	for total := forced.len(); total < q.size; count++ {
		total += others[count].len()
	}
	var best found
	tried, most := 0, 0
	complete := eachUnion(forced, others, count, q.size, func(from set) bool {
		if tried == maxNUMASets && n.table == nil {
			return false
		}
		part := q
		part.from = from
		f := n.search(Topology, part)
		most = max(most, f.score+f.bound)
		if tried == 0 || f.compare(&best) < 0 {
			best = f
		}
		tried++
		return true
	})
	if !complete {
		all := n.search(Topology, q)
		most = all.score + all.bound
	}
	best.numaNodes = numaNodes + count
	best.bound = most - best.score
	best.exact = best.bound == 0
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
