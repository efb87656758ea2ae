package topology

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// joint is what a bar of a level stands for, in words from long to short.
var joint = map[gpu.PCIePath][]string{
	gpu.PathSameBoard:        {"one board (PSB)", "board", "PSB"},
	gpu.PathSingleSwitch:     {"PCIe switch (PIX)", "PCIe switch", "PIX"},
	gpu.PathMultipleSwitches: {"PCIe switches (PXB)", "PCIe switches", "PXB"},
	gpu.PathHostBridge:       {"host bridge (PHB)", "host bridge", "PHB"},
}

// drawSocket draws a NUMA node's frame and the bars in it.
func (l *layout) drawSocket(g *group) {
	name := l.numaName(g)
	x0, x1 := l.extent(g)
	first, last := l.at[g.gpus[0]].line, l.at[g.gpus[len(g.gpus)-1]].line
	top, bottom := first.cards-pad, l.socketBar(last)+barHeight+barGap
	l.back = append(l.back, Group{
		Class: "numa", Title: name, Data: [][2]string{{"numa", name}, {"gpus", l.indices(g.gpus)}},
		Shapes: []Shape{Rect{Class: "frame", X: x0 - pad, Y: top, W: x1 - x0 + 2*pad, H: bottom - top, CornerRadius: 8}},
	})
	for _, c := range g.children {
		c.walk(func(c *group) {
			if c.path != gpu.PathUnknown {
				l.drawBar(c, c.path.String(), joint[c.path], slices.Index(l.levels, c.path))
			}
		})
	}
	labels := []string{name, strings.ReplaceAll(name, "NUMA node", "NUMA")}
	path := ""
	if g.path == gpu.PathNode {
		path = g.path.String()
		labels = slices.Insert(labels, 0, name+" (NODE)")
		labels = slices.Insert(labels, 0, name+", across its host bridges (NODE)")
	}
	l.drawBar(g, path, labels, len(l.levels))
}

func (l *layout) socketBar(ln *line) int { return ln.bars + len(l.levels)*(barHeight+barGap) }

// extent is how far a group reaches to both sides, in all its lines.
func (l *layout) extent(g *group) (x0, x1 int) {
	x0, x1 = l.at[g.gpus[0]].x, 0
	for _, p := range g.gpus {
		x0, x1 = min(x0, l.at[p].x), max(x1, l.at[p].x+l.cardW)
	}
	return x0, x1
}

// drawBar draws a group's bar, with the stems of what stands on it.
func (l *layout) drawBar(g *group, path string, labels []string, level int) {
	class := strings.ToLower(path)
	if level == len(l.levels) {
		class = "node"
	}
	thing := Group{
		Class: "bar", Title: labels[0] + ": " + l.names(g.gpus),
		Data: [][2]string{{"path", path}, {"gpus", l.indices(g.gpus)}},
	}
	for _, seg := range l.segments(g) {
		y := seg.line.bars + level*(barHeight+barGap)
		for _, c := range g.children {
			thing.Shapes = append(thing.Shapes, l.stems(c, seg.line, y)...)
		}
		thing.Shapes = append(thing.Shapes, Rect{Class: "bar " + class, X: seg.x0, Y: y, W: seg.x1 - seg.x0, H: barHeight, CornerRadius: 4})
		if label := choose(seg.x1-seg.x0-8, 11, plain, partLabels(seg, labels)...); label != "" {
			thing.Shapes = append(thing.Shapes, Text{
				Class: "on-bar", X: (seg.x0 + seg.x1) / 2, Y: y + 14, Size: 11, Anchor: Middle, String: label,
			})
		}
	}
	l.middle = append(l.middle, thing)
}

// partLabels tells of a bar that goes on in another line which part it is.
func partLabels(s segment, labels []string) []string {
	if s.of == 1 {
		return labels
	}
	var list []string
	for _, label := range labels {
		list = append(list, fmt.Sprintf("%s, part %d of %d", label, s.part, s.of))
	}
	return append(list, labels...)
}

// stems join what stands on a bar with the bar, in one line.
func (l *layout) stems(child *group, ln *line, y int) []Shape {
	var shapes []Shape
	for _, seg := range l.segments(child) {
		if seg.line != ln {
			continue
		}
		top := ln.cards + ln.h
		if child.path != gpu.PathUnknown {
			top = ln.bars + slices.Index(l.levels, child.path)*(barHeight+barGap) + barHeight
		}
		x := (seg.x0 + seg.x1) / 2
		shapes = append(shapes, Path{Class: "stem", Points: [][2]int{{x, top}, {x, y}}})
	}
	return shapes
}

// drawSystem draws what joins the NUMA nodes: a bar below each shelf, and a line at the side that joins these.
func (l *layout) drawSystem() {
	if len(l.tree) < 2 {
		return
	}
	known := l.systemPaths()
	thing := Group{
		Class: "bar", Title: l.systemLabels(known)[0] + ": all GPUs",
		Data: [][2]string{{"path", known.String()}, {"gpus", l.indices(flatten(l.tree))}},
	}
	for i, s := range l.shelves {
		last := s.lines[len(s.lines)-1]
		y := l.socketBar(last) + barHeight + 3*barGap
		x0, x1 := l.left, l.shelfEnd(s)
		if len(l.shelves) > 1 {
			x1 = l.right + spineStep
			if i > 0 {
				thing.Shapes = append(thing.Shapes, Path{
					Class: "spine", Points: [][2]int{{x1 - 4, l.systemBar(l.shelves[i-1]) + barHeight/2}, {x1 - 4, y + barHeight/2}}, Stroke: 8,
				})
			}
		}
		for _, g := range s.sockets {
			a, b := l.extent(g)
			thing.Shapes = append(thing.Shapes, Path{Class: "stem", Points: [][2]int{{(a + b) / 2, y - 2*barGap}, {(a + b) / 2, y}}})
		}
		thing.Shapes = append(
			thing.Shapes,
			Rect{Class: "bar system", X: x0, Y: y, W: x1 - x0, H: barHeight, CornerRadius: 4},
			Text{
				Class: "on-bar", X: (x0 + x1) / 2, Y: y + 14, Size: 11, Anchor: Middle,
				String: choose(x1-x0-8, 11, plain, l.systemLabels(known)...),
			},
		)
	}
	l.middle = append(l.middle, thing)
	if len(l.shelves) > 1 {
		l.right += spineStep
	}
}

func (l *layout) systemBar(s *shelf) int {
	return l.socketBar(s.lines[len(s.lines)-1]) + barHeight + 3*barGap
}

func (l *layout) shelfEnd(s *shelf) int {
	end := 0
	for _, g := range s.sockets {
		_, x1 := l.extent(g)
		end = max(end, x1+pad)
	}
	return end
}

// systemPaths is the path between NUMA nodes, or PathUnknown where none of them is known.
func (l *layout) systemPaths() gpu.PCIePath {
	for i, g := range l.tree {
		for _, h := range l.tree[i+1:] {
			if anyPair(g.gpus, h.gpus, func(a, b int) bool { return l.links.path(a, b) == gpu.PathSystem }) {
				return gpu.PathSystem
			}
		}
	}
	return gpu.PathUnknown
}

func (l *layout) systemLabels(path gpu.PCIePath) []string {
	if path == gpu.PathSystem {
		return []string{"between NUMA nodes (SYS)", "SYS"}
	}
	return []string{"between these nothing is known", "not known", "?"}
}

func flatten(tree []*group) []int {
	var all []int
	for _, g := range tree {
		all = append(all, g.gpus...)
	}
	return all
}

// numaName names a group after the NUMA nodes of its GPUs.
func (l *layout) numaName(g *group) string {
	var nodes []int
	for _, p := range g.gpus {
		if n := l.s.Devices[p].NUMANode; n >= 0 {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	switch nodes = slices.Compact(nodes); len(nodes) {
	case 0:
		return "NUMA node unknown"
	case 1:
		return "NUMA node " + strconv.Itoa(nodes[0])
	default:
		return "NUMA nodes " + ranges(nodes)
	}
}

// indices are GPUs by index, for a data attribute.
func (l *layout) indices(gpus []int) string {
	var list []string
	for _, p := range gpus {
		list = append(list, strconv.Itoa(l.s.Devices[p].Index))
	}
	return strings.Join(list, " ")
}

// names are GPUs by index, in words.
func (l *layout) names(gpus []int) string {
	var list []int
	for _, p := range gpus {
		list = append(list, l.s.Devices[p].Index)
	}
	slices.Sort(list)
	return count(len(list), "GPU", "GPUs") + " " + ranges(list)
}

func count(n int, one, more string) string {
	if n == 1 {
		return one
	}
	return more
}

// ranges writes sorted numbers as "0-3, 5".
func ranges(list []int) string {
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		switch j - i {
		case 0:
			parts = append(parts, strconv.Itoa(list[i]))
		case 1:
			parts = append(parts, strconv.Itoa(list[i]), strconv.Itoa(list[j]))
		default:
			parts = append(parts, strconv.Itoa(list[i])+"-"+strconv.Itoa(list[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ", ")
}
