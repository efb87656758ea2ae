package topology

import (
	"cmp"
	"slices"
)

// Sizes and distances in pixels.
const (
	margin       = 24 // around the picture
	header       = 78
	minContent   = 600 // minimum width of the content
	cardWidth    = 112
	cardGap      = 8
	pad          = 12 // between a frame of a NUMA node and its cards
	numaGap      = 16
	barHeight    = 20
	barGap       = 8
	laneHeight   = 18 // height of a bracket
	fabricHeight = 26 // height of a bar of NVSwitches
	bundleHeight = 34 // between the bars of NVSwitches and what is below them
)

// layout has the positions of the GPUs and their links, in pixels.
type layout struct {
	left, right int     // ends of the frames of the NUMA nodes
	x           []int   // by GPU
	brackets    []*span // by the pair's index in scene.direct
	fabrics     []*span // by index in scene.fabrics

	cards, cardHeight int // upper edge and height of the cards
	bundles           int // upper edge of the space between the bars of NVSwitches and what is below them
}

// newLayout places the NUMA nodes from left to right and, from top to bottom, the bars of the NVSwitches, the brackets
// of the NVLinks, the cards, and the bars of the groups.
func newLayout(s *scene) *layout {
	l := &layout{x: make([]int, len(s.Snapshot.Devices))}
	numaNodes := s.root.children
	width := len(l.x)*(cardWidth+cardGap) + len(numaNodes)*(2*pad-cardGap+numaGap) - numaGap
	l.left = margin + max(minContent-width, 0)/2 // the drawing of a small node is in the middle of the picture
	l.right = l.left + width
	x := l.left
	for _, numa := range numaNodes {
		x += pad
		for _, p := range numa.gpus {
			l.x[p] = x
			x += cardWidth + cardGap
		}
		x += pad - cardGap + numaGap
	}
	for _, pair := range s.direct {
		a, b := pair[0], pair[1]
		if l.x[a] > l.x[b] {
			a, b = b, a
		}
		l.brackets = append(l.brackets, &span{x0: l.exit(s, a, b), x1: l.exit(s, b, a)})
	}
	for _, gpus := range s.fabrics {
		x0, x1 := l.extent(gpus)
		l.fabrics = append(l.fabrics, &span{x0: x0, x1: x1})
	}
	y := header
	if lanes := assignLanes(l.fabrics); lanes > 0 {
		l.bundles = l.fabricY(lanes) - barGap
		y = l.bundles + bundleHeight
	}
	if lanes := assignLanes(l.brackets); lanes > 0 {
		y += lanes*laneHeight + 14
	}
	l.cards = y + pad
	for i := range l.x { // all cards have the height of the highest
		l.cardHeight = max(l.cardHeight, drawCard(&svg{}, s, i, box{}))
	}
	return l
}

// extent returns the left and right end of the cards of these GPUs.
func (l *layout) extent(gpus []int) (x0, x1 int) {
	x0 = l.x[gpus[0]]
	for _, p := range gpus {
		x0, x1 = min(x0, l.x[p]), max(x1, l.x[p]+cardWidth)
	}
	return x0, x1
}

// fabricY returns the upper edge of a bar of NVSwitches.
func (l *layout) fabricY(lane int) int { return header + lane*(fabricHeight+barGap) }

// bracketY returns the vertical middle of a bracket.
func (l *layout) bracketY(lane int) int { return l.cards - pad - (lane+1)*laneHeight }

// barY returns the upper edge of the bars of groups with this level.
func (l *layout) barY(level int) int {
	return l.cards + l.cardHeight + barGap + (level-1)*(barHeight+barGap)
}

// toSwitches stands for the NVSwitches in a call of exit, which otherwise gets a GPU.
const toSwitches = -1

// exit returns the point on the upper edge of a GPU's card at which its NVLinks to another GPU leave. Links to the
// left leave on the left, those to the nearest GPU first, so that the brackets of a card do not cross.
func (l *layout) exit(s *scene, p, to int) int {
	var left, right []int
	for _, pair := range s.direct {
		if !slices.Contains(pair[:], p) {
			continue
		}
		if other := pair[0] + pair[1] - p; l.x[other] < l.x[p] {
			left = append(left, other)
		} else {
			right = append(right, other)
		}
	}
	fromTheRight := func(a, b int) int { return cmp.Compare(l.x[b], l.x[a]) }
	slices.SortFunc(left, fromTheRight)
	slices.SortFunc(right, fromTheRight)
	exits := left
	if slices.ContainsFunc(s.fabrics, func(gpus []int) bool { return slices.Contains(gpus, p) }) {
		exits = append(exits, toSwitches)
	}
	exits = append(exits, right...)
	return l.x[p] + cardWidth*(slices.Index(exits, to)+1)/(len(exits)+1)
}

// span is a range from x0 to x1. Spans that overlap are in different lanes.
type span struct{ x0, x1, lane int }

// assignLanes gives each span the lowest free lane, the narrow spans first, and returns the number of lanes.
func assignLanes(spans []*span) int {
	sorted := slices.SortedStableFunc(slices.Values(spans), func(a, b *span) int {
		return cmp.Or(cmp.Compare(a.x1-a.x0, b.x1-b.x0), cmp.Compare(a.x0, b.x0))
	})
	lanes := 0
	for i, s := range sorted {
		overlaps := func(t *span) bool { return t.lane == s.lane && s.x0 < t.x1+4 && t.x0 < s.x1+4 }
		for slices.ContainsFunc(sorted[:i], overlaps) {
			s.lane++
		}
		lanes = max(lanes, s.lane+1)
	}
	return lanes
}
