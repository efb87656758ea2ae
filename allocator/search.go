package allocator

import (
	"cmp"
	"math"
	"slices"
)

// query is a request for GPUs: choose `size` GPUs of `from`, with all of `must`. GPUs that are in `available` but not
// in `from` cannot be chosen, and count as left for the next requests. must ⊆ from ⊆ available.
type query struct {
	available, from, must set
	size                  int
}

// found is a set of GPUs that answers a query.
type found struct {
	set       set
	numaNodes int // the number of NUMA nodes, if the policy counts them
	score     int
	next      int // the L of Topology for the remaining GPUs, if the policy counts it
	cost      int // the score with all available GPUs: the lower, the better connected are the remaining GPUs
}

// compare is negative if a is better than b. No two sets are equal.
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

// search returns the best set of GPUs for a policy. There is one, since the request is valid.
func (n *GPUs) search(p Policy, q query) set {
	switch {
	case n.table == nil:
		return n.searchGreedily(p, q)
	case p == Partition:
		return n.table.searchPartitions(q)
	default:
		return n.table.search(p, q)
	}
}

// searchGreedily grows a set from each GPU, and returns the best of these sets.
func (n *GPUs) searchGreedily(p Policy, q query) set {
	if q.size == q.must.len() {
		return q.must
	}
	cost := make([]int, len(n.list))
	for g := range cost {
		cost[g] = n.scoreWith(q.available, g)
	}
	var best *found
	for _, g := range q.from.difference(q.must).members() {
		if f := n.grow(p, q, g, cost); best == nil || f.compare(best) < 0 {
			best = f
		}
	}
	return best.set
}

// grow extends q.must to q.size GPUs. It adds the GPU `first`, and then each time the GPU with the highest score with
// those that are chosen. For the policy NUMA, GPUs of NUMA nodes already in use come first, and then those of the NUMA
// node with the most GPUs.
func (n *GPUs) grow(p Policy, q query, first int, cost []int) *found {
	f := &found{}
	with := make([]int, len(n.list)) // the score of each GPU with the chosen ones
	room := make([]int, len(n.list)) // the number of GPUs on each GPU's NUMA node, if the policy counts NUMA nodes
	add := func(g int) {
		f.score += with[g]
		f.cost += cost[g]
		if p == NUMA && room[g] < math.MaxInt {
			f.numaNodes++
			for _, other := range n.numa[g].members() {
				room[other] = math.MaxInt
			}
		}
		f.set.add(g)
		for other, s := range n.score[g] {
			with[other] += s
		}
	}
	if p == NUMA {
		for g := range room {
			room[g] = n.numa[g].intersection(q.from).len()
		}
	}
	for _, g := range q.must.members() {
		add(g)
	}
	add(first)
	for f.set.len() < q.size {
		add(slices.MaxFunc(q.from.difference(f.set).members(), func(a, b int) int {
			return cmp.Or(cmp.Compare(room[a], room[b]), cmp.Compare(with[a], with[b]), cmp.Compare(cost[b], cost[a]))
		}))
	}
	return f
}
