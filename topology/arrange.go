package topology

import (
	"slices"

	"gpu-cdi-plugin/gpu"
)

// Sizes and distances in pixels.
const (
	margin      = 24 // around the picture
	headerSpace = 78
	minContent  = 600 // of the width
	cardGap     = 8
	pad         = 12 // between a NUMA node's frame and its cards
	numaGap     = 16
	barHeight   = 20
	barGap      = 8
	spineStep   = 14 // between the vertical lines at the sides
)

// positions are where everything of a scene is.
type positions struct {
	width, height int
	frames        []box // by NUMA node
	bars          []bar
	fabrics       []fabricPosition // by fabric
	nvlinks       []nvlinkPosition
	cards         []card // by GPU
	legend        legend
}

// bar stands for a group: a switch, a bridge, a NUMA node, or what is between the NUMA nodes. It has a part in each row
// that has GPUs of the group.
type bar struct {
	kind  barKind
	group *group
	parts []barPart
}

// barKind is what a bar's group is.
type barKind int

const (
	pcieBar   barKind = iota // a board, switch or host bridge
	numaBar                  // a NUMA node
	systemBar                // all NUMA nodes
)

type barPart struct {
	box
	stems []stem
	spine *stem // to the part before, at the side
}

// stem is a vertical line.
type stem struct{ x, top, bottom int }

// arrange finds the positions of a scene: first from left to right, then from top to bottom, since the height of the
// space for NVLinks depends on how many of them are side by side.
func arrange(s *scene) *positions {
	g := newGrid(s)
	routes, right := routeNVLinks(s, g)
	fabrics := spanFabrics(s, g)
	p := &positions{cards: make([]card, len(s.Snapshot.Devices))}
	for i := range p.cards {
		p.cards[i] = newCard(s, i)
	}
	rows, bottom := stackRows(s, g, p.cards, routes, fabrics)
	for i := range p.cards { // the cards of a row have the same height
		r := rows[g.row[i]]
		p.cards[i].x, p.cards[i].y, p.cards[i].h = g.x[i], r.cards, r.cardH
	}
	for _, sh := range g.shelves {
		for _, numa := range sh.numa {
			x0, x1 := g.extent(numa.gpus)
			top, bottom := rows[sh.first].cards-pad, rows[sh.last].barY(len(s.levels)+1)
			p.frames = append(p.frames, box{x0 - pad, top, x1 - x0 + 2*pad, bottom - top})
			numa.walk(func(gr *group) {
				switch {
				case gr == numa:
					p.bars = append(p.bars, newBar(s, g, rows, numaBar, gr))
				case gr.path != gpu.PathUnknown:
					p.bars = append(p.bars, newBar(s, g, rows, pcieBar, gr))
				}
			})
		}
	}
	if len(g.shelves) > 1 {
		right += spineStep
	}
	if len(s.tree) > 1 {
		p.bars = append(p.bars, newSystemBar(s, g, rows, right))
	}
	for i := range s.fabrics {
		p.fabrics = append(p.fabrics, newFabricPosition(s, g, rows, routes, i, fabrics[i]))
	}
	for i := range routes {
		p.nvlinks = append(p.nvlinks, newNVLinkPosition(rows, routes, i))
	}
	content := max(right, margin+minContent)
	p.legend = newLegend(s, content-margin, bottom+2*barGap)
	p.width, p.height = content+margin, p.legend.bottom+margin-textLine/2
	return p
}

// grid is which row each card is in, and where it is from left to right.
type grid struct {
	cardWidth   int
	left, right int // ends of the NUMA nodes' frames
	rows        [][]int
	shelves     []shelf
	row, x      []int // of each GPU
	spines      []int // x of the line that joins a fabric's bars, or 0 if there is one bar
}

// shelf is NUMA nodes side by side in one row, or a single one in several rows.
type shelf struct {
	numa        []*group
	first, last int // rows
}

func newGrid(s *scene) *grid {
	gpus := len(s.Snapshot.Devices)
	g := &grid{cardWidth: s.cardWidth, row: make([]int, gpus), x: make([]int, gpus)}
	for _, numa := range pack(s.tree, s.cardsPerRow) {
		first := len(g.rows)
		if len(numa) == 1 {
			g.rows = append(g.rows, numa[0].rowsOf(s.cardsPerRow)...)
		} else {
			g.rows = append(g.rows, flatten(numa))
		}
		g.shelves = append(g.shelves, shelf{numa, first, len(g.rows) - 1})
	}
	numaOf := map[int]int{}
	for i, numa := range s.tree {
		for _, p := range numa.gpus {
			numaOf[p] = i
		}
	}
	width := 0
	for r, gpus := range g.rows {
		x := pad
		for i, p := range gpus {
			switch {
			case i == 0:
			case numaOf[p] != numaOf[gpus[i-1]]:
				x += 2*pad + numaGap
			default:
				x += cardGap
			}
			g.row[p], g.x[p] = r, x
			x += g.cardWidth
		}
		width = max(width, x+pad)
	}
	// A fabric with cards in several rows has a spine on the left. A narrow node is in the middle of the picture.
	g.spines = make([]int, len(s.fabrics))
	var spines []*int
	for i, f := range s.fabrics {
		if slices.ContainsFunc(f.gpus, func(p int) bool { return g.row[p] != g.row[f.gpus[0]] }) {
			spines = append(spines, &g.spines[i])
		}
	}
	g.left = margin + max(minContent-len(spines)*spineStep-width, 0)/2
	for _, spine := range spines {
		*spine = g.left
		g.left += spineStep
	}
	g.right = g.left + width
	for p := range g.x {
		g.x[p] += g.left
	}
	return g
}

// extent returns how far cards reach to the left and right, in all rows.
func (g *grid) extent(gpus []int) (x0, x1 int) {
	x0 = g.x[gpus[0]]
	for _, p := range gpus {
		x0, x1 = min(x0, g.x[p]), max(x1, g.x[p]+g.cardWidth)
	}
	return x0, x1
}

// spans returns the part of a group in each of its rows, from its first card there to its last.
func (g *grid) spans(gr *group) []span {
	var list []span
	for _, p := range gr.gpus {
		if n := len(list); n > 0 && list[n-1].row == g.row[p] {
			list[n-1].x1 = g.x[p] + g.cardWidth
		} else {
			list = append(list, span{row: g.row[p], x0: g.x[p], x1: g.x[p] + g.cardWidth})
		}
	}
	return list
}

// newBar finds the position of a group's bar. Below a row the bars of each path have a level. The last level has those
// of the NUMA nodes.
func newBar(s *scene, g *grid, rows []row, kind barKind, gr *group) bar {
	b, level := bar{kind: kind, group: gr}, slices.Index(s.levels, gr.path)
	if kind == numaBar {
		level = len(s.levels)
	}
	for _, sp := range g.spans(gr) {
		r := rows[sp.row]
		part := barPart{box: box{sp.x0, r.barY(level), sp.x1 - sp.x0, barHeight}}
		for _, c := range gr.children {
			top := r.cards + r.cardH
			if c.path != gpu.PathUnknown {
				top = r.barY(slices.Index(s.levels, c.path)) + barHeight
			}
			for _, cs := range g.spans(c) {
				if cs.row == sp.row {
					part.stems = append(part.stems, stem{(cs.x0 + cs.x1) / 2, top, part.y})
				}
			}
		}
		b.parts = append(b.parts, part)
	}
	return b
}

// newSystemBar finds the position of the bar between the NUMA nodes. It has a part below each shelf. Several parts end
// at the right side, where a spine joins them.
func newSystemBar(s *scene, g *grid, rows []row, right int) bar {
	all := &group{gpus: flatten(s.tree), children: s.tree}
	for i, numa := range s.tree {
		others := flatten(s.tree[i+1:])
		if anyPair(numa.gpus, others, func(a, b int) bool { return s.links.path(a, b) == gpu.PathSystem }) {
			all.path = gpu.PathSystem
		}
	}
	b := bar{kind: systemBar, group: all}
	for i, sh := range g.shelves {
		y := rows[sh.last].barY(len(s.levels)+1) + 2*barGap
		part := barPart{box: box{g.left, y, right - g.left, barHeight}}
		if len(g.shelves) == 1 {
			part.w = g.right - g.left
		}
		if i > 0 {
			part.spine = &stem{right - 4, b.parts[i-1].y + barHeight/2, y + barHeight/2}
		}
		for _, numa := range sh.numa {
			x0, x1 := g.extent(numa.gpus)
			part.stems = append(part.stems, stem{(x0 + x1) / 2, y - 2*barGap, y})
		}
		b.parts = append(b.parts, part)
	}
	return b
}

// row is where a row of cards is from top to bottom, with the NVLinks above it and the bars below it.
type row struct {
	top                int // of the space for NVLinks
	brackets, fabrics  int // lanes of brackets and of bars of NVSwitches
	cards, cardH, bars int // upper edge and height of the cards, upper edge of the bars
}

// barY returns the upper edge of the bars of a level.
func (r row) barY(level int) int { return r.bars + level*(barHeight+barGap) }

// stackRows puts the rows below each other, and returns where the last one ends.
func stackRows(s *scene, g *grid, cards []card, routes []route, fabrics [][]span) ([]row, int) {
	rows := make([]row, len(g.rows))
	for i, gpus := range g.rows {
		for _, p := range gpus {
			rows[i].cardH = max(rows[i].cardH, cards[p].h)
		}
	}
	for _, r := range routes {
		for _, sp := range r.spans {
			rows[sp.row].brackets = max(rows[sp.row].brackets, sp.lane+1)
		}
	}
	for _, sp := range slices.Concat(fabrics...) {
		rows[sp.row].fabrics = max(rows[sp.row].fabrics, sp.lane+1)
	}
	y := headerSpace
	for _, sh := range g.shelves {
		for i := sh.first; i <= sh.last; i++ {
			r := &rows[i]
			r.top = y
			r.cards = y + r.nvlinkSpace() + pad
			r.bars = r.cards + r.cardH + barGap
			y = r.barY(len(s.levels) + 1)
		}
		y += barGap
		if len(s.tree) > 1 {
			y += barHeight + 2*barGap
		}
	}
	return rows, y
}
