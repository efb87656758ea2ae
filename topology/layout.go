package topology

import (
	"cmp"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// What the drawing is made of, in pixels.
const (
	margin      = 24
	cardGap     = 8
	pad         = 12 // between a NUMA node's frame and what is in it
	socketGap   = 16
	barHeight   = 20
	barGap      = 8
	spineStep   = 14 // between the lines that join rows at the sides
	minContent  = 600
	headerSpace = 78
)

// A node of more than fullSize GPUs is drawn with small cards, and more of them in a row.
const (
	fullSize      = 16
	cardsInRow    = 8
	smallInRow    = 16
	fullWidth     = 118
	smallWidth    = 68
	mostMIGHeight = 112 // of the slices of a whole GPU
)

// layout is a picture in the making.
type layout struct {
	node    Node
	s       *gpu.Snapshot
	links   links
	tree    []*group
	levels  []gpu.PCIePath // that occur, from near to far, without that of NUMA nodes
	small   bool
	cardW   int
	left    int // where the first card's NUMA node begins
	right   int // where the longest row ends
	lines   []*line
	shelves []*shelf
	at      []spot // by position of the GPU
	fabrics []*fabric
	wires   []*wire
	pods    pods
	cards   []card
	y       int
	back    []Shape // frames
	middle  []Shape // bars and links
	front   []Shape // cards and words
}

// spot is where a GPU's card is.
type spot struct {
	line *line
	x    int
}

// line is a row of cards.
type line struct {
	gpus     []int
	channel  channel
	cards, h int // the cards' upper edge, and their height
	bars     int // the upper edge of the first bar
}

// shelf is NUMA nodes side by side, each of one line, or a single one of several lines.
type shelf struct {
	sockets []*group
	lines   []*line
}

func newLayout(n Node) *layout {
	l := &layout{node: n, s: n.Snapshot, links: linksOf(n.Snapshot), left: margin, y: headerSpace}
	l.tree = sockets(l.s, l.links)
	l.levels = levelsOf(l.tree)
	l.small = len(l.s.Devices) > fullSize
	l.cardW = fullWidth
	if l.small {
		l.cardW = smallWidth
	}
	l.pods = podsOf(n)
	l.fabrics = fabricsOf(l.links, len(l.s.Devices))
	l.at = make([]spot, len(l.s.Devices))
	for i := range l.s.Devices {
		l.cards = append(l.cards, l.card(i))
	}
	return l
}

func levelsOf(tree []*group) []gpu.PCIePath {
	var found []gpu.PCIePath
	for _, top := range tree {
		for _, c := range top.children {
			c.walk(func(g *group) {
				if g.path != gpu.PathUnknown {
					found = append(found, g.path)
				}
			})
		}
	}
	slices.SortFunc(found, func(a, b gpu.PCIePath) int { return cmp.Compare(b, a) })
	found = slices.Compact(found)
	return slices.DeleteFunc(found, func(p gpu.PCIePath) bool { return p == gpu.PathNode })
}

// rows lays out everything but the words around it.
func (l *layout) rows() {
	l.divide()
	l.spread()
	l.connect()
	for _, s := range l.shelves {
		l.shelf(s)
	}
	l.drawSystem()
	l.drawFabrics()
	l.drawWires()
	for i := range l.cards {
		l.drawCard(i)
	}
}

// divide puts the GPUs in lines.
func (l *layout) divide() {
	limit := cardsInRow
	if l.small {
		limit = smallInRow
	}
	for _, sockets := range shelves(l.tree, limit) {
		s := &shelf{sockets: sockets}
		if len(sockets) == 1 {
			for _, gpus := range sockets[0].lines(limit) {
				s.lines = append(s.lines, &line{gpus: gpus})
			}
		} else {
			s.lines = []*line{{}}
			for _, g := range sockets {
				s.lines[0].gpus = append(s.lines[0].gpus, g.gpus...)
			}
		}
		l.shelves = append(l.shelves, s)
		l.lines = append(l.lines, s.lines...)
	}
}

// spread gives each card its place in its line.
func (l *layout) spread() {
	for _, f := range l.fabrics {
		if f.spine = -1; l.spansLines(f.gpus, func(i int) *line { return l.lineOf(i) }) {
			f.spine = l.left
			l.left += spineStep
		}
	}
	l.right = l.left
	for _, s := range l.shelves {
		for _, ln := range s.lines {
			x := l.left
			for i, p := range ln.gpus {
				switch {
				case i == 0:
					x += pad
				case l.socketOf(p) != l.socketOf(ln.gpus[i-1]):
					x += 2*pad + socketGap
				default:
					x += cardGap
				}
				l.at[p] = spot{ln, x}
				x += l.cardW
			}
			l.right = max(l.right, x+pad)
		}
	}
	l.centre()
}

// centre moves a narrow node to the middle of the picture.
func (l *layout) centre() {
	spare := minContent - (l.right - margin)
	if spare <= 0 {
		return
	}
	for i := range l.at {
		l.at[i].x += spare / 2
	}
	for _, f := range l.fabrics {
		f.spine += spare / 2
	}
	l.left += spare / 2
	l.right += spare / 2
}

func (l *layout) lineOf(p int) *line {
	for _, ln := range l.lines {
		if slices.Contains(ln.gpus, p) {
			return ln
		}
	}
	return nil
}

func (l *layout) spansLines(gpus []int, of func(int) *line) bool {
	return slices.ContainsFunc(gpus, func(p int) bool { return of(p) != of(gpus[0]) })
}

func (l *layout) socketOf(p int) *group {
	for _, g := range l.tree {
		if slices.Contains(g.gpus, p) {
			return g
		}
	}
	return nil
}

// shelf lays out the lines of a shelf from y on, and moves y below them.
func (l *layout) shelf(s *shelf) {
	for _, ln := range s.lines {
		ln.channel.top = l.y
		ln.cards = l.y + ln.channel.height() + pad
		for _, p := range ln.gpus {
			ln.h = max(ln.h, l.cards[p].h)
		}
		ln.bars = ln.cards + ln.h + barGap
		l.y = ln.bars + len(l.levels)*(barHeight+barGap) + barHeight + barGap
	}
	for _, g := range s.sockets {
		l.drawSocket(g)
	}
	l.y += barGap
	if len(l.tree) > 1 {
		l.y += barHeight + 2*barGap
	}
}

// segment is the part of a group that is in one line.
type segment struct {
	line     *line
	x0, x1   int
	part, of int
}

// segments are the parts of a group, from its first line to its last.
func (l *layout) segments(g *group) []segment {
	var list []segment
	for _, p := range g.gpus {
		s := l.at[p]
		if n := len(list); n > 0 && list[n-1].line == s.line {
			list[n-1].x1 = s.x + l.cardW
			continue
		}
		list = append(list, segment{line: s.line, x0: s.x, x1: s.x + l.cardW})
	}
	for i := range list {
		list[i].part, list[i].of = i+1, len(list)
	}
	return list
}
