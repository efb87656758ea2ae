package topology

import (
	"cmp"
	"maps"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// group is a set of GPUs that are close to each other on PCIe, such as those below one switch.
type group struct {
	// path is the path between the children. It is PathUnknown for a single GPU, and where the driver reports no path.
	path     gpu.PCIePath
	gpus     []int // in drawing order
	children []*group
}

// links are a snapshot's links by the positions of their GPUs, the lower one first. Links of GPUs that are not in the
// snapshot are left out.
type links map[[2]int]gpu.Link

func linksOf(s *gpu.Snapshot) links {
	at := map[int]int{}
	for i := range s.Devices {
		at[s.Devices[i].Index] = i
	}
	ls := links{}
	for _, l := range s.Links {
		a, okA := at[l.A]
		b, okB := at[l.B]
		if okA && okB && a != b {
			ls[[2]int{min(a, b), max(a, b)}] = l
		}
	}
	return ls
}

func (ls links) path(a, b int) gpu.PCIePath { return ls[[2]int{min(a, b), max(a, b)}].PCIe }

// pairs returns the linked pairs, sorted.
func (ls links) pairs() [][2]int { return slices.SortedFunc(maps.Keys(ls), comparePairs) }

func comparePairs(x, y [2]int) int { return slices.Compare(x[:], y[:]) }

// numaGroups derives a tree from the paths between the GPUs, by single linkage: two GPUs are in one group of a level if
// a chain of pairs with at least that path connects them. The top groups are the NUMA nodes. Where the paths are not
// those of a tree, notInTree returns the pairs that are farther apart than their group shows.
func numaGroups(s *gpu.Snapshot, ls links) []*group {
	groups := make([]*group, len(s.Devices))
	for i := range groups {
		groups[i] = &group{gpus: []int{i}}
	}
	for level := gpu.PathSameBoard; level >= gpu.PathNode; level-- {
		groups = merge(groups, level, func(a, b int) bool {
			if p := ls.path(a, b); p != gpu.PathUnknown || level != gpu.PathNode {
				return p >= level
			}
			// The driver reports no path: the kernel's NUMA nodes decide.
			return max(s.Devices[a].NUMANode, gpu.NoNUMANode) == max(s.Devices[b].NUMANode, gpu.NoNUMANode)
		})
	}
	for i, g := range groups {
		switch {
		case g.path != gpu.PathNode: // a NUMA node is drawn around a single GPU or switch too
			groups[i] = &group{gpus: g.gpus, children: []*group{g}}
		case !anyPair(g.gpus, g.gpus, func(a, b int) bool { return ls.path(a, b) == gpu.PathNode }):
			g.path = gpu.PathUnknown
		}
	}
	return groups
}

// merge joins the groups that have a linked pair between them, directly or through others.
func merge(groups []*group, level gpu.PCIePath, linked func(a, b int) bool) []*group {
	var merged []*group
	for rest := groups; len(rest) > 0; {
		children := []*group{rest[0]}
		rest = rest[1:]
		for i := 0; i < len(children); i++ {
			var others []*group
			for _, g := range rest {
				if anyPair(children[i].gpus, g.gpus, linked) {
					children = append(children, g)
				} else {
					others = append(others, g)
				}
			}
			rest = others
		}
		if len(children) == 1 {
			merged = append(merged, children[0])
			continue
		}
		slices.SortFunc(children, func(a, b *group) int { return cmp.Compare(slices.Min(a.gpus), slices.Min(b.gpus)) })
		merged = append(merged, &group{path: level, gpus: flatten(children), children: children})
	}
	return merged
}

// flatten returns the GPUs of groups in drawing order.
func flatten(groups []*group) []int {
	var gpus []int
	for _, g := range groups {
		gpus = append(gpus, g.gpus...)
	}
	return gpus
}

func anyPair(as, bs []int, linked func(a, b int) bool) bool {
	for _, a := range as {
		for _, b := range bs {
			if linked(a, b) {
				return true
			}
		}
	}
	return false
}

// levelsOf returns the paths of the groups inside the NUMA nodes, from near to far.
func levelsOf(tree []*group) []gpu.PCIePath {
	var found []gpu.PCIePath
	for _, numa := range tree {
		for _, c := range numa.children {
			c.walk(func(g *group) {
				if g.path != gpu.PathUnknown && !slices.Contains(found, g.path) {
					found = append(found, g.path)
				}
			})
		}
	}
	slices.Sort(found)
	slices.Reverse(found)
	return found
}

// walk visits a group and all groups in it, the inner ones first.
func (g *group) walk(do func(*group)) {
	for _, c := range g.children {
		c.walk(do)
	}
	do(g)
}

// notInTree returns the pairs that are farther apart than the group shows that has both, sorted.
func notInTree(tree []*group, ls links) [][2]int {
	var pairs [][2]int
	for _, numa := range tree {
		numa.walk(func(g *group) {
			shown := max(g.path, gpu.PathNode) // GPUs that only the kernel puts on one NUMA node are shown as PathNode
			for i, c := range g.children {
				for _, a := range c.gpus {
					for _, b := range flatten(g.children[i+1:]) {
						if p := ls.path(a, b); p != gpu.PathUnknown && p < shown {
							pairs = append(pairs, [2]int{min(a, b), max(a, b)})
						}
					}
				}
			}
		})
	}
	slices.SortFunc(pairs, comparePairs)
	return pairs
}

// rowsOf divides a NUMA node's GPUs into rows of at most limit GPUs. It keeps groups together that fit into a row.
func (g *group) rowsOf(limit int) [][]int {
	var rows [][]int
	for _, groups := range pack(g.split(limit), limit) {
		rows = append(rows, flatten(groups))
	}
	return rows
}

// split divides a group into parts of at most limit GPUs.
func (g *group) split(limit int) []*group {
	if len(g.gpus) <= limit {
		return []*group{g}
	}
	var parts []*group
	for _, c := range g.children {
		parts = append(parts, c.split(limit)...)
	}
	return parts
}

// pack divides groups, in order, into as few runs as possible with at most limit GPUs each, and as even as possible. A
// group of more than limit GPUs gets a run of its own.
func pack(groups []*group, limit int) [][]*group {
	runs := packGreedily(groups, limit)
	for l := 1; l < limit; l++ {
		if even := packGreedily(groups, l); len(even) == len(runs) {
			return even
		}
	}
	return runs
}

func packGreedily(groups []*group, limit int) [][]*group {
	var runs [][]*group
	size := 0
	for i, g := range groups {
		if i == 0 || size+len(g.gpus) > limit {
			runs = append(runs, nil)
			size = 0
		}
		runs[len(runs)-1] = append(runs[len(runs)-1], g)
		size += len(g.gpus)
	}
	return runs
}
