package topology

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"gpu-cdi-plugin/gpu"
)

// What NVLinks are drawn with, in pixels.
const (
	laneHeight   = 18 // of a bracket
	fabricHeight = 26
	bundleHeight = 34 // between a bar of NVSwitches and what is below it
	pillHeight   = 14
	mostStroke   = 10
)

// fabric is GPUs that NVSwitches join.
type fabric struct {
	gpus  []int       // by position
	ports map[int]int // how many NVLinks each has to the switches
	spine int         // x of the line that joins its bars, or -1 if it is in one line of cards
	lanes map[*line]int
}

// fabricsOf finds the GPUs that have NVLinks through switches in common. What a GPU has to the switches is the most that
// any other GPU sees of it.
func fabricsOf(ls links, n int) []*fabric {
	of := make([]*fabric, n)
	for _, p := range ls.pairs() {
		link := ls[p]
		if !link.Switched || link.NVLinks <= 0 {
			continue
		}
		of[p[0]] = union(of[p[0]], of[p[1]], of)
		if of[p[0]] == nil {
			of[p[0]] = &fabric{ports: map[int]int{}, lanes: map[*line]int{}}
		}
		f := of[p[0]]
		of[p[1]] = f
		for _, i := range p {
			f.ports[i] = max(f.ports[i], link.NVLinks)
		}
	}
	var found []*fabric
	for i, f := range of {
		if f == nil {
			continue
		}
		f.gpus = append(f.gpus, i)
		if !slices.Contains(found, f) {
			found = append(found, f)
		}
	}
	return found
}

// union makes one fabric of two, either of which may be nil.
func union(f, g *fabric, of []*fabric) *fabric {
	if f == nil {
		return g
	}
	if g == nil || g == f {
		return f
	}
	for i, n := range g.ports {
		f.ports[i] = max(f.ports[i], n)
	}
	for i := range of {
		if of[i] == g {
			of[i] = f
		}
	}
	return f
}

// wire is NVLinks that join two GPUs directly.
type wire struct {
	link   gpu.Link
	a, b   int   // positions
	ends   []end // one for each line that it runs in
	gutter int   // x where it changes lines, or -1
}

// end is a bracket of a wire in one line of cards: between two cards, or between a card and the gutter.
type end struct {
	line   *line
	x0, x1 int
	lane   int
}

// channel is the space above a line of cards, where its NVLinks are.
type channel struct {
	top            int
	wires, fabrics int // lanes
}

func (c channel) height() int {
	h := c.wiresHeight()
	if c.fabrics > 0 {
		h += c.fabrics*(fabricHeight+barGap) - barGap + bundleHeight
	}
	return h
}

func (c channel) wiresHeight() int {
	if c.wires == 0 {
		return 0
	}
	return c.wires*laneHeight + 14
}

// wireY is the middle of a bracket's lane; lane 0 is next to the cards.
func (c channel) wireY(lane int) int { return c.top + c.height() - 18 - lane*laneHeight }

// fabricY is the upper edge of a bar of NVSwitches.
func (c channel) fabricY(lane int) int {
	return c.top + c.height() - c.wiresHeight() - bundleHeight - fabricHeight - lane*(fabricHeight+barGap)
}

// connect finds the way of every NVLink: where it leaves its cards, and its lane above them.
func (l *layout) connect() {
	for _, p := range l.links.pairs() {
		if link := l.links[p]; link.NVLinks > 0 && !link.Switched {
			w := &wire{link: link, a: p[0], b: p[1], gutter: -1}
			if l.at[w.a].x > l.at[w.b].x {
				w.a, w.b = w.b, w.a
			}
			if l.at[w.a].line != l.at[w.b].line {
				w.gutter = l.right + spineStep/2
				l.right += spineStep
			}
			l.wires = append(l.wires, w)
		}
	}
	for _, w := range l.wires {
		a, b := l.at[w.a].line, l.at[w.b].line
		if w.gutter < 0 {
			w.ends = []end{{line: a, x0: l.leave(w.a, w), x1: l.leave(w.b, w)}}
		} else {
			w.ends = []end{{line: a, x0: l.leave(w.a, w), x1: w.gutter}, {line: b, x0: l.leave(w.b, w), x1: w.gutter}}
		}
	}
	for _, ln := range l.lines {
		l.assignWires(ln)
		l.assignFabrics(ln)
	}
}

// leave is where on a card's upper edge a wire leaves it, or the bundle to a fabric if w is nil. Those to the left leave
// on the left, the nearest first; so brackets of one card do not cross each other.
func (l *layout) leave(p int, w *wire) int {
	type way struct {
		wire *wire
		side int
		far  int
	}
	var ways []way
	for _, other := range l.wires {
		switch {
		case other.a != p && other.b != p:
		case other.gutter >= 0:
			ways = append(ways, way{other, 2, -other.gutter})
		case other.b == p:
			ways = append(ways, way{other, 0, l.at[p].x - l.at[other.a].x})
		default:
			ways = append(ways, way{other, 2, l.at[p].x - l.at[other.b].x})
		}
	}
	if slices.ContainsFunc(l.fabrics, func(f *fabric) bool { return f.ports[p] > 0 }) {
		ways = append(ways, way{side: 1})
	}
	slices.SortStableFunc(ways, func(a, b way) int { return cmp.Or(cmp.Compare(a.side, b.side), cmp.Compare(a.far, b.far)) })
	i := slices.IndexFunc(ways, func(v way) bool { return v.wire == w })
	return l.at[p].x + l.cardW*(i+1)/(len(ways)+1)
}

func (l *layout) assignWires(ln *line) {
	var ends []*end
	for _, w := range l.wires {
		for i := range w.ends {
			if w.ends[i].line == ln {
				ends = append(ends, &w.ends[i])
			}
		}
	}
	slices.SortStableFunc(ends, func(a, b *end) int {
		return cmp.Or(cmp.Compare(a.x1-a.x0, b.x1-b.x0), cmp.Compare(a.x0, b.x0))
	})
	var taken lanes
	for _, e := range ends {
		e.lane = taken.take(e.x0, e.x1)
	}
	ln.channel.wires = len(taken)
}

func (l *layout) assignFabrics(ln *line) {
	var taken lanes
	for _, f := range l.fabrics {
		if x0, x1, ok := l.fabricIn(f, ln); ok {
			f.lanes[ln] = taken.take(x0, x1)
		}
	}
	ln.channel.fabrics = len(taken)
}

// fabricIn is how far a fabric's bar reaches in a line of cards.
func (l *layout) fabricIn(f *fabric, ln *line) (x0, x1 int, ok bool) {
	for _, p := range f.gpus {
		if l.at[p].line != ln {
			continue
		}
		if !ok {
			x0, ok = l.at[p].x, true
		}
		x0, x1 = min(x0, l.at[p].x), max(x1, l.at[p].x+l.cardW)
	}
	if ok && f.spine >= 0 {
		x0 = f.spine
	}
	return x0, x1, ok
}

// lanes are the intervals that each lane has already.
type lanes [][][2]int

// take finds the lowest lane that is free from x0 to x1.
func (ls *lanes) take(x0, x1 int) int {
	free := func(lane [][2]int) bool {
		return !slices.ContainsFunc(lane, func(t [2]int) bool { return x0 < t[1]+4 && t[0] < x1+4 })
	}
	i := slices.IndexFunc(*ls, free)
	if i < 0 {
		i = len(*ls)
		*ls = append(*ls, nil)
	}
	(*ls)[i] = append((*ls)[i], [2]int{x0, x1})
	return i
}

func (l *layout) drawFabrics() {
	for _, f := range l.fabrics {
		thing := Group{
			Class: "nvswitch", Title: "NVSwitches join " + l.names(f.gpus) + ", with " + f.width() + " each",
			Data: [][2]string{{"gpus", l.indices(f.gpus)}},
		}
		var spine [][2]int
		var bundles []Shape
		for _, ln := range l.lines {
			x0, x1, ok := l.fabricIn(f, ln)
			if !ok {
				continue
			}
			y := ln.channel.fabricY(f.lanes[ln])
			spine = append(spine, [2]int{x0 + 4, y + fabricHeight/2})
			thing.Shapes = append(thing.Shapes, l.fabricBar(f, x0, x1, y)...)
			for _, p := range f.gpus {
				if l.at[p].line == ln {
					bundles = append(bundles, l.bundle(p, f.ports[p], y+fabricHeight))
				}
			}
		}
		if len(spine) > 1 {
			ends := [][2]int{spine[0], spine[len(spine)-1]}
			thing.Shapes = slices.Insert(thing.Shapes, 0, Shape(Path{Class: "nvspine", Points: ends, Stroke: 8}))
		}
		l.middle = append(l.middle, bundles...)
		l.middle = append(l.middle, thing)
	}
}

func (l *layout) fabricBar(f *fabric, x0, x1, y int) []Shape {
	label := choose(x1-x0-8, 12, bold, "NVSwitch, "+f.width()+" from each GPU", "NVSwitch, "+f.width(), "NVSwitch", "NVS")
	return []Shape{
		Rect{Class: "fabric", X: x0, Y: y, W: x1 - x0, H: fabricHeight, CornerRadius: 6},
		Text{Class: "on-fabric", X: (x0 + x1) / 2, Y: y + 17, Size: 12, Font: bold, Anchor: Middle, String: label},
	}
}

// width says how many NVLinks the GPUs have to the switches.
func (f *fabric) width() string {
	least, most := f.ports[f.gpus[0]], 0
	for _, n := range f.ports {
		least, most = min(least, n), max(most, n)
	}
	if least == most {
		return strconv.Itoa(most) + count(most, " NVLink", " NVLinks")
	}
	return fmt.Sprintf("%d to %d NVLinks", least, most)
}

// bundle is the NVLinks of a GPU to the switches.
func (l *layout) bundle(p, links, y int) Shape {
	x, bottom := l.leave(p, nil), l.at[p].line.cards
	return Group{
		Class: "nvlink", Title: fmt.Sprintf("GPU %d: %d %s to the NVSwitches", l.s.Devices[p].Index, links, count(links, "NVLink", "NVLinks")),
		Data: [][2]string{{"gpus", l.indices([]int{p})}, {"nvlinks", strconv.Itoa(links)}, {"switched", "true"}},
		Shapes: append(
			[]Shape{Path{Class: "nv", Points: [][2]int{{x, y}, {x, bottom}}, Stroke: min(3+links*2/3, 16)}},
			pill(x, y+bundleHeight/2, links)...,
		),
	}
}

// pill is the number of NVLinks in the middle of their line.
func pill(x, y, links int) []Shape {
	s := strconv.Itoa(links)
	w := width(s, 11, bold) + 10
	return []Shape{
		Rect{Class: "pill", X: x - w/2, Y: y - pillHeight/2, W: w, H: pillHeight, CornerRadius: 7},
		Text{Class: "on-pill", X: x, Y: y + 4, Size: 11, Font: bold, Anchor: Middle, String: s},
	}
}

// drawWires draws the direct NVLinks. The numbers come last, so that no other link hides one.
func (l *layout) drawWires() {
	var numbers []Shape
	for _, w := range l.wires {
		n := w.link.NVLinks
		stroke := min(2*n, mostStroke)
		l.middle = append(l.middle, Group{
			Class: "nvlink",
			Title: fmt.Sprintf("GPU %d and GPU %d: %d %s", w.link.A, w.link.B, n, count(n, "NVLink", "NVLinks")),
			Data: [][2]string{
				{"gpus", fmt.Sprintf("%d %d", w.link.A, w.link.B)}, {"nvlinks", strconv.Itoa(n)}, {"switched", "false"},
			},
			Shapes: []Shape{
				Path{Class: "halo", Points: w.points(-pad - 2), Stroke: stroke + 4},
				Path{Class: "nv", Points: w.points(0), Stroke: stroke},
			},
		})
		first := w.ends[0]
		numbers = append(numbers, pill(l.numberAt(w), first.line.channel.wireY(first.lane), n)...)
	}
	l.middle = append(l.middle, numbers...)
}

// points is the way of a wire, from somewhere above or at the edge of a card to that of the other.
func (w *wire) points(from int) [][2]int {
	var points [][2]int
	for i, e := range w.ends {
		y := e.line.channel.wireY(e.lane)
		way := [][2]int{{e.x0, e.line.cards + from}, {e.x0, y}, {e.x1, y}}
		if i == 1 {
			slices.Reverse(way)
		}
		points = append(points, way...)
	}
	if w.gutter < 0 {
		points = append(points, [2]int{w.ends[0].x1, w.ends[0].line.cards + from})
	}
	return points
}

// numberAt is where on its bracket a wire has its number: near the middle, but on no other wire's way up.
func (l *layout) numberAt(w *wire) int {
	const reach, step = 14, 4
	e := w.ends[0]
	middle := (e.x0 + e.x1) / 2
	for off := 0; off < (e.x1-e.x0)/2-reach; off += step {
		for _, x := range []int{middle + off, middle - off} {
			if !l.crossed(e, x, reach) {
				return x
			}
		}
	}
	return middle
}

// crossed tells whether another wire runs up or down through a bracket near x.
func (l *layout) crossed(bracket end, x, reach int) bool {
	for _, w := range l.wires {
		for i, e := range w.ends {
			if e.line != bracket.line {
				continue
			}
			above, below := e.lane > bracket.lane, e.lane < bracket.lane
			if above && near(e.x0, x, reach) {
				return true
			}
			// From a gutter the upper bracket goes down and the lower one goes up.
			if near(e.x1, x, reach) && (above && i == 0 || below && i == 1) {
				return true
			}
		}
	}
	return false
}

func near(a, b, reach int) bool { return a-b < reach && b-a < reach }
