package allocator

import "slices"

// maxNUMASets is the most sets of NUMA nodes that are looked into.
const maxNUMASets = 32

// fewestNUMANodes is the answer to NUMA where there are too many GPUs for a table: the best of the topology of each set
// of NUMA nodes that is as small as can be. They share the steps.
func (n *Node) fewestNUMANodes(q query, steps *int) found {
	forced, others, count := n.enoughNodes(q)
	f, tried, most := found{score: -1}, 0, 0
	complete := eachUnion(forced, others, count, q.size, func(from set) bool {
		if tried == maxNUMASets {
			return false
		}
		tried++
		part := q
		part.from = from
		next := n.topology(part, steps)
		most = max(most, next.score+next.bound)
		if next.score > f.score || next.score == f.score && n.taken(q, next.set) < n.taken(q, f.set) {
			f = next
		}
		return true
	})
	if !complete {
		all := n.topology(q, steps)
		most = all.score + all.bound
	}
	f.bound = most - f.score
	f.exact = f.bound == 0
	for _, node := range n.numa {
		if node.and(f.set) != (set{}) {
			f.nodes++
		}
	}
	return f
}

// enoughNodes are the GPUs of the NUMA nodes that are needed in any case, those of each of the others, most first, and how
// many of the others are needed at least.
func (n *Node) enoughNodes(q query) (forced set, others []set, count int) {
	for _, node := range n.numa {
		switch usable := node.and(q.from); {
		case node.and(q.must) != set{}:
			forced = forced.with(usable)
		case usable != set{}:
			others = append(others, usable)
		}
	}
	slices.SortStableFunc(others, func(a, b set) int { return b.len() - a.len() })
	for total := forced.len(); total < q.size; count++ {
		total += others[count].len()
	}
	return forced, others, count
}

// eachUnion calls with the union of base and each count of the sets, which have most first, that has at least size GPUs,
// until visit is false, which it returns.
func eachUnion(base set, sets []set, count, size int, visit func(set) bool) bool {
	if count == 0 {
		return visit(base)
	}
	for i := 0; i <= len(sets)-count && mostOf(base, sets[i:i+count]) >= size; i++ {
		if !eachUnion(base.with(sets[i]), sets[i+1:], count-1, size, visit) {
			return false
		}
	}
	return true
}

func mostOf(base set, sets []set) int {
	most := base.len()
	for _, s := range sets {
		most += s.len()
	}
	return most
}

// taken is what the GPUs of x score with all that is available.
func (n *Node) taken(q query, x set) int {
	sum := 0
	for _, g := range x.places() {
		sum += n.with(q.available, g)
	}
	return sum
}
