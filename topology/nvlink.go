package topology

import (
	"cmp"
	"fmt"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// Sizes of NVLinks, in pixels.
const (
	laneHeight   = 18 // of a bracket
	fabricHeight = 26 // of a bar of NVSwitches
	bundleHeight = 34 // between a bar of NVSwitches and what is below it
)

// fabric is GPUs that are connected by NVSwitches.
type fabric struct {
	gpus  []int
	ports map[int]int // by GPU: its NVLinks to the switches
}

// fabricsOf returns the fabrics of n GPUs. A GPU has as many NVLinks to the switches as the widest of its links.
func fabricsOf(ls links, n int) []fabric {
	of := make([]int, n) // for each GPU, the lowest GPU of its fabric
	for i := range of {
		of[i] = i
	}
	ports := make([]int, n)
	for _, p := range ls.pairs() {
		link := ls[p]
		if !link.Switched || link.NVLinks <= 0 {
			continue
		}
		a, b := min(of[p[0]], of[p[1]]), max(of[p[0]], of[p[1]])
		for i := range of {
			if of[i] == b {
				of[i] = a
			}
		}
		ports[p[0]], ports[p[1]] = max(ports[p[0]], link.NVLinks), max(ports[p[1]], link.NVLinks)
	}
	var found []fabric
	index := map[int]int{}
	for i, first := range of {
		if ports[i] == 0 {
			continue
		}
		if i == first {
			index[first] = len(found)
			found = append(found, fabric{ports: map[int]int{}})
		}
		f := &found[index[first]]
		f.gpus = append(f.gpus, i)
		f.ports[i] = ports[i]
	}
	return found
}

// width returns how many NVLinks each GPU has to the switches, in words.
func (f fabric) width() string {
	least, most := f.ports[f.gpus[0]], 0
	for _, n := range f.ports {
		least, most = min(least, n), max(most, n)
	}
	if least == most {
		return plural(most, "NVLink")
	}
	return fmt.Sprintf("%d to %d NVLinks", least, most)
}

// span is from x0 to x1 in a row. Spans that overlap are in different lanes; lane 0 is next to the cards.
type span struct{ row, x0, x1, lane int }

// assignLanes gives each span the lowest lane that is free in its row.
func assignLanes(spans []*span) {
	taken := map[[2]int][]*span{} // by row and lane
	for _, s := range spans {
		overlaps := func(t *span) bool { return s.x0 < t.x1+4 && t.x0 < s.x1+4 }
		for s.lane = 0; slices.ContainsFunc(taken[[2]int{s.row, s.lane}], overlaps); {
			s.lane++
		}
		key := [2]int{s.row, s.lane}
		taken[key] = append(taken[key], s)
	}
}

// spanFabrics returns how far the bars of each fabric reach in their rows.
func spanFabrics(s *scene, g *grid) [][]span {
	fabrics := make([][]span, len(s.fabrics))
	var all []*span
	for i, f := range s.fabrics {
		for r := range g.rows {
			gpus := f.inRow(g, r)
			if len(gpus) == 0 {
				continue
			}
			x0, x1 := g.extent(gpus)
			if g.spines[i] > 0 {
				x0 = g.spines[i]
			}
			fabrics[i] = append(fabrics[i], span{row: r, x0: x0, x1: x1})
		}
		for j := range fabrics[i] {
			all = append(all, &fabrics[i][j])
		}
	}
	assignLanes(all)
	return fabrics
}

func (f fabric) inRow(g *grid, r int) []int {
	return slices.DeleteFunc(slices.Clone(f.gpus), func(p int) bool { return g.row[p] != r })
}

// route is the way of the NVLinks between two GPUs: a bracket in one row, or two that meet in a gutter at the right
// side.
type route struct {
	link   gpu.Link
	a, b   int // the GPUs, from left to right
	gutter int // x, or 0 where both GPUs are in one row
	spans  []span
}

// routeNVLinks routes the direct NVLinks, and returns where their gutters end.
func routeNVLinks(s *scene, g *grid) (routes []route, right int) {
	right = g.right
	for _, p := range s.direct {
		r := route{link: s.links[p], a: p[0], b: p[1]}
		if g.x[r.a] > g.x[r.b] {
			r.a, r.b = r.b, r.a
		}
		if g.row[r.a] != g.row[r.b] {
			r.gutter = right + spineStep/2
			right += spineStep
		}
		routes = append(routes, r)
	}
	var all []*span
	for i := range routes {
		r := &routes[i]
		x0, x1 := exit(s, g, routes, r.a, i), exit(s, g, routes, r.b, i)
		if r.gutter == 0 {
			r.spans = []span{{row: g.row[r.a], x0: x0, x1: x1}}
		} else {
			r.spans = []span{{row: g.row[r.a], x0: x0, x1: r.gutter}, {row: g.row[r.b], x0: x1, x1: r.gutter}}
		}
		for j := range r.spans {
			all = append(all, &r.spans[j])
		}
	}
	slices.SortStableFunc(all, func(a, b *span) int {
		return cmp.Or(cmp.Compare(a.x1-a.x0, b.x1-b.x0), cmp.Compare(a.x0, b.x0))
	})
	assignLanes(all)
	return routes, right
}

// toSwitches stands for the NVLinks to NVSwitches where exit expects a route.
const toSwitches = -1

// exit returns where on a card's upper edge a route leaves it. Routes to the left leave on the left, the nearest first,
// so that the brackets of one card do not cross.
func exit(s *scene, g *grid, routes []route, p, wanted int) int {
	type way struct{ route, side, order int }
	var ways []way
	for i, r := range routes {
		switch {
		case r.a != p && r.b != p:
		case r.gutter > 0:
			ways = append(ways, way{i, 2, -r.gutter})
		case r.b == p:
			ways = append(ways, way{i, 0, g.x[p] - g.x[r.a]})
		default:
			ways = append(ways, way{i, 2, g.x[p] - g.x[r.b]})
		}
	}
	if slices.ContainsFunc(s.fabrics, func(f fabric) bool { return f.ports[p] > 0 }) {
		ways = append(ways, way{toSwitches, 1, 0})
	}
	slices.SortStableFunc(ways, func(a, b way) int {
		return cmp.Or(cmp.Compare(a.side, b.side), cmp.Compare(a.order, b.order))
	})
	i := slices.IndexFunc(ways, func(w way) bool { return w.route == wanted })
	return g.x[p] + s.cardWidth*(i+1)/(len(ways)+1)
}

// nvlinkSpace returns the height of the space above the cards.
func (r row) nvlinkSpace() int {
	h := r.bracketSpace()
	if r.fabrics > 0 {
		h += r.fabrics*(fabricHeight+barGap) - barGap + bundleHeight
	}
	return h
}

func (r row) bracketSpace() int {
	if r.brackets == 0 {
		return 0
	}
	return r.brackets*laneHeight + 14
}

// bracketY returns the middle of a bracket.
func (r row) bracketY(lane int) int { return r.top + r.nvlinkSpace() - laneHeight - lane*laneHeight }

// fabricY returns the upper edge of a bar of NVSwitches.
func (r row) fabricY(lane int) int {
	return r.top + r.nvlinkSpace() - r.bracketSpace() - bundleHeight - fabricHeight - lane*(fabricHeight+barGap)
}

// fabricPosition is where a fabric's bars are, one in each row, and the NVLinks of its GPUs to them.
type fabricPosition struct {
	bars    []box
	bundles []bundle
}

// bundle is the NVLinks of a GPU to the switches.
type bundle struct {
	stem
	gpu int
}

func newFabricPosition(s *scene, g *grid, rows []row, routes []route, fabric int, spans []span) fabricPosition {
	var p fabricPosition
	for _, sp := range spans {
		r := rows[sp.row]
		bar := box{sp.x0, r.fabricY(sp.lane), sp.x1 - sp.x0, fabricHeight}
		p.bars = append(p.bars, bar)
		for _, i := range s.fabrics[fabric].inRow(g, sp.row) {
			p.bundles = append(p.bundles, bundle{stem{exit(s, g, routes, i, toSwitches), bar.y + bar.h, r.cards}, i})
		}
	}
	return p
}

// nvlinkPosition is where the direct NVLinks of a pair are.
type nvlinkPosition struct {
	link   gpu.Link
	points []point // from card to card
	number point   // the middle of their number
}

func newNVLinkPosition(rows []row, routes []route, i int) nvlinkPosition {
	r := routes[i]
	p := nvlinkPosition{link: r.link}
	for j, sp := range r.spans {
		y := rows[sp.row].bracketY(sp.lane)
		way := []point{{sp.x0, rows[sp.row].cards}, {sp.x0, y}, {sp.x1, y}}
		if j == 1 {
			slices.Reverse(way)
		}
		p.points = append(p.points, way...)
	}
	first := r.spans[0]
	if r.gutter == 0 {
		p.points = append(p.points, point{first.x1, rows[first.row].cards})
	}
	p.number = point{numberX(routes, first), rows[first.row].bracketY(first.lane)}
	return p
}

// numberX returns where a bracket has its number: near the middle, but away from vertical lines of other brackets.
func numberX(routes []route, bracket span) int {
	const reach, step = 14, 4
	middle := (bracket.x0 + bracket.x1) / 2
	for off := 0; off < (bracket.x1-bracket.x0)/2-reach; off += step {
		for _, x := range []int{middle + off, middle - off} {
			if !isCrossed(routes, bracket, x, reach) {
				return x
			}
		}
	}
	return middle
}

// isCrossed reports whether another route goes up or down through a bracket near x.
func isCrossed(routes []route, bracket span, x, reach int) bool {
	near := func(at int) bool { return at-x < reach && x-at < reach }
	for _, r := range routes {
		for i, sp := range r.spans {
			if sp.row != bracket.row {
				continue
			}
			above, below := sp.lane > bracket.lane, sp.lane < bracket.lane
			// From a gutter the upper bracket goes down and the lower one goes up.
			if above && near(sp.x0) || near(sp.x1) && (above && i == 0 || below && i == 1) {
				return true
			}
		}
	}
	return false
}
