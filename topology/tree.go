package topology

import (
	"cmp"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// group is a set of GPUs that are near to each other on PCIe. GPUs are named by their position in the snapshot.
type group struct {
	// path joins the group's children; PathUnknown for a single GPU, or where nothing is known of what joins them.
	path     gpu.PCIePath
	gpus     []int // in the order in which they are drawn
	children []*group
}

// levels are the paths that join GPUs of one NUMA node, from near to far. The farthest, PathNode, makes the NUMA nodes.
var levels = []gpu.PCIePath{
	gpu.PathSameBoard, gpu.PathSingleSwitch, gpu.PathMultipleSwitches, gpu.PathHostBridge, gpu.PathNode,
}

// links is a snapshot's links by position instead of index. Links of GPUs that the snapshot has not are left out.
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

// pairs are the linked pairs, sorted.
func (ls links) pairs() [][2]int {
	pairs := make([][2]int, 0, len(ls))
	for p := range ls {
		pairs = append(pairs, p)
	}
	slices.SortFunc(pairs, func(x, y [2]int) int { return cmp.Or(cmp.Compare(x[0], y[0]), cmp.Compare(x[1], y[1])) })
	return pairs
}

// sockets derives the tree of the GPUs from how far apart each two of them are: GPUs are in one group if a chain of
// pairs that are at least that near joins them. On a machine that is a tree every pair of a group is as near; misfits
// finds those that are not.
func sockets(s *gpu.Snapshot, ls links) []*group {
	groups := make([]*group, len(s.Devices))
	for i := range groups {
		groups[i] = &group{gpus: []int{i}}
	}
	for _, level := range levels {
		groups = merge(groups, level, func(a, b int) bool { return joined(s, ls, level, a, b) })
	}
	for i, g := range groups {
		switch {
		case g.path != gpu.PathNode: // a NUMA node is drawn around a single GPU or switch too
			groups[i] = &group{gpus: g.gpus, children: []*group{g}}
		case !anyPath(ls, g.gpus, gpu.PathNode):
			g.path = gpu.PathUnknown
		}
	}
	return groups
}

// joined tells whether two GPUs belong together at a level. Where the path between two is not known, the NUMA node that
// the kernel names decides.
func joined(s *gpu.Snapshot, ls links, level gpu.PCIePath, a, b int) bool {
	if p := ls.path(a, b); p != gpu.PathUnknown || level != gpu.PathNode {
		return p >= level
	}
	return max(s.Devices[a].NUMANode, gpu.NoNUMANode) == max(s.Devices[b].NUMANode, gpu.NoNUMANode)
}

// merge unites the groups of which some members are joined.
func merge(groups []*group, level gpu.PCIePath, joined func(a, b int) bool) []*group {
	var merged []*group
	for left := slices.Clone(groups); len(left) > 0; {
		children := []*group{left[0]}
		left = left[1:]
		for i := 0; i < len(children); i++ {
			near := func(g *group) bool { return anyPair(children[i].gpus, g.gpus, joined) }
			rest := left[:0:0]
			for _, g := range left {
				if near(g) {
					children = append(children, g)
				} else {
					rest = append(rest, g)
				}
			}
			left = rest
		}
		merged = append(merged, parent(level, children))
	}
	return merged
}

func parent(level gpu.PCIePath, children []*group) *group {
	if len(children) == 1 {
		return children[0]
	}
	slices.SortFunc(children, func(a, b *group) int { return cmp.Compare(slices.Min(a.gpus), slices.Min(b.gpus)) })
	g := &group{path: level, children: children}
	for _, c := range children {
		g.gpus = append(g.gpus, c.gpus...)
	}
	return g
}

func anyPair(as, bs []int, joined func(a, b int) bool) bool {
	for _, a := range as {
		for _, b := range bs {
			if joined(a, b) {
				return true
			}
		}
	}
	return false
}

func anyPath(ls links, gpus []int, path gpu.PCIePath) bool {
	return anyPair(gpus, gpus, func(a, b int) bool { return a != b && ls.path(a, b) == path })
}

// walk visits a group and all groups in it, the inner ones first.
func (g *group) walk(do func(*group)) {
	for _, c := range g.children {
		c.walk(do)
	}
	do(g)
}

// misfits are the pairs that the tree shows nearer than the driver says they are, sorted.
func misfits(groups []*group, ls links) [][2]int {
	var pairs [][2]int
	for _, top := range groups {
		top.walk(func(g *group) {
			for i, c := range g.children {
				for _, d := range g.children[i+1:] {
					pairs = append(pairs, farther(c, d, g.path, ls)...)
				}
			}
		})
	}
	slices.SortFunc(pairs, func(x, y [2]int) int { return cmp.Or(cmp.Compare(x[0], y[0]), cmp.Compare(x[1], y[1])) })
	return pairs
}

func farther(c, d *group, path gpu.PCIePath, ls links) [][2]int {
	path = max(path, gpu.PathNode) // what the kernel alone has put on one NUMA node is shown as near as that
	var pairs [][2]int
	for _, a := range c.gpus {
		for _, b := range d.gpus {
			if p := ls.path(a, b); p != gpu.PathUnknown && p < path {
				pairs = append(pairs, [2]int{min(a, b), max(a, b)})
			}
		}
	}
	return pairs
}
