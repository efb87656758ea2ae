package topology

import (
	"cmp"
	"maps"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// links has a snapshot's links. A key has the indices of two GPUs, the lower one first. Links to GPUs that are not in
// the snapshot are left out.
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

func (ls links) between(a, b int) gpu.Link { return ls[[2]int{min(a, b), max(a, b)}] }

// pairs returns the linked pairs, sorted.
func (ls links) pairs() [][2]int {
	return slices.SortedFunc(maps.Keys(ls), func(x, y [2]int) int { return slices.Compare(x[:], y[:]) })
}

// group is a set of GPUs that are close to each other on PCIe, such as those below one switch.
type group struct {
	// path is the PCIe path between the children. It is PathUnknown for a single GPU, or if the driver reports none.
	path     gpu.PCIePath
	gpus     []int // in drawing order
	children []*group
	level    int // higher than the children's; 0 for a single GPU
}

func newGroup(path gpu.PCIePath, children []*group) *group {
	g := &group{path: path, children: children}
	for _, c := range children {
		g.gpus, g.level = append(g.gpus, c.gpus...), max(g.level, c.level+1)
	}
	return g
}

// treeOf derives a tree from the paths between the GPUs by single linkage: two GPUs are in one group if they are
// connected by a chain of pairs, each of them at least as close as the group's path. The root's children are the NUMA
// nodes, all on one level. If the paths do not form a tree, notInTree returns the pairs that are farther apart than
// the drawing shows.
func treeOf(s *gpu.Snapshot, ls links) *group {
	groups := singles(len(s.Devices))
	for path := gpu.PathSameBoard; path >= gpu.PathNode; path-- {
		groups = merge(groups, path, func(a, b int) bool {
			if p := ls.between(a, b).PCIe; p != gpu.PathUnknown || path != gpu.PathNode {
				return p >= path
			}
			// The driver reports no path, so the kernel's NUMA nodes decide.
			return max(s.Devices[a].NUMANode, gpu.NoNUMANode) == max(s.Devices[b].NUMANode, gpu.NoNUMANode)
		})
	}
	for i, g := range groups {
		switch {
		case g.path != gpu.PathNode: // a frame of a NUMA node can also contain a single GPU or switch
			groups[i] = newGroup(gpu.PathUnknown, []*group{g})
		case !anyPair(g.gpus, g.gpus, func(a, b int) bool { return ls.between(a, b).PCIe == gpu.PathNode }):
			g.path = gpu.PathUnknown
		}
	}
	root := newGroup(gpu.PathUnknown, groups)
	for _, numa := range groups {
		numa.level = root.level - 1
	}
	if anyPair(root.gpus, root.gpus, func(a, b int) bool { return ls.between(a, b).PCIe == gpu.PathSystem }) {
		root.path = gpu.PathSystem
	}
	return root
}

// fabricsOf returns the sets of GPUs that NVSwitches connect. n is the number of GPUs.
func fabricsOf(ls links, n int) [][]int {
	var fabrics [][]int
	for _, g := range merge(singles(n), gpu.PathUnknown, func(a, b int) bool {
		l := ls.between(a, b)
		return l.Switched && l.NVLinks > 0
	}) {
		if len(g.gpus) > 1 {
			fabrics = append(fabrics, g.gpus)
		}
	}
	return fabrics
}

// singles returns a group for each of n GPUs.
func singles(n int) []*group {
	groups := make([]*group, n)
	for i := range groups {
		groups[i] = &group{gpus: []int{i}}
	}
	return groups
}

// merge joins groups that have a linked pair of GPUs, and groups that are joined to a common one.
func merge(groups []*group, path gpu.PCIePath, linked func(a, b int) bool) []*group {
	var sets [][]*group
	for _, g := range groups {
		set := []*group{g}
		var others [][]*group
		for _, other := range sets {
			if slices.ContainsFunc(other, func(o *group) bool { return anyPair(g.gpus, o.gpus, linked) }) {
				set = append(set, other...)
			} else {
				others = append(others, other)
			}
		}
		sets = append(others, set)
	}
	byFirst := func(a, b *group) int { return cmp.Compare(slices.Min(a.gpus), slices.Min(b.gpus)) }
	var merged []*group
	for _, set := range sets {
		slices.SortFunc(set, byFirst)
		if len(set) == 1 {
			merged = append(merged, set[0])
		} else {
			merged = append(merged, newGroup(path, set))
		}
	}
	slices.SortFunc(merged, byFirst)
	return merged
}

func anyPair(as, bs []int, linked func(a, b int) bool) bool {
	return slices.ContainsFunc(as, func(a int) bool {
		return slices.ContainsFunc(bs, func(b int) bool { return linked(a, b) })
	})
}

// smallestWith returns the smallest group in g that contains both GPUs.
func (g *group) smallestWith(a, b int) *group {
	for _, c := range g.children {
		if slices.Contains(c.gpus, a) && slices.Contains(c.gpus, b) {
			return c.smallestWith(a, b)
		}
	}
	return g
}

// notInTree returns the pairs that are farther apart than the smallest group shows that contains both, sorted.
func notInTree(root *group, ls links) [][2]int {
	return slices.DeleteFunc(ls.pairs(), func(p [2]int) bool {
		g, path := root.smallestWith(p[0], p[1]), ls[p].PCIe
		// If only the kernel puts two GPUs on one NUMA node, the drawing shows PathNode for them.
		return path == gpu.PathUnknown || g == root || path >= max(g.path, gpu.PathNode)
	})
}
