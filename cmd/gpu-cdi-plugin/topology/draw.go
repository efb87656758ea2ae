package topology

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wording"
)

// draw writes the shapes of a scene.
func draw(s *scene) []byte {
	l, b := newLayout(s), &svg{}
	for _, numa := range s.root.children {
		x0, x1 := l.extent(numa.gpus)
		top, bottom := l.cards-pad, l.barY(numa.level+1)
		b.group("numa", "", []attribute{{"numa", s.numaName(numa)}, {"gpus", s.indices(numa.gpus)}}, func() {
			b.rect("frame", box{x0 - pad, top, x1 - x0 + 2*pad, bottom - top}, 8)
		})
	}
	top := s.root
	if len(top.children) == 1 {
		top = top.children[0]
	}
	bottom := drawBars(b, s, l, top)
	for i := range s.fabrics {
		drawFabric(b, s, l, i)
	}
	drawNVLinks(b, s, l)
	for i, x := range l.x {
		drawCard(b, s, i, box{x, l.cards, cardWidth, l.cardHeight})
	}
	width := max(l.right, margin+minContent) + margin
	room := width - 2*margin
	bottom = drawLegend(b, s, room, bottom+3*barGap)
	title, subtitle := s.title(), s.subtitle()
	b.text(text{class: "title", x: margin, y: margin + 14, size: 18, font: bold, value: fit(title, room, 18, bold)})
	b.text(text{class: "faint", x: margin, y: margin + 34, size: 12, value: fit(subtitle, room, 12, plain)})
	return b.page(width, bottom+margin, title, subtitle)
}

var barLabels = map[gpu.PCIePath]string{
	gpu.PathSameBoard:        "one board (PSB)",
	gpu.PathSingleSwitch:     "PCIe switch (PIX)",
	gpu.PathMultipleSwitches: "PCIe switches (PXB)",
	gpu.PathHostBridge:       "host bridge (PHB)",
}

// drawBars draws the bars of a group and of the groups in it. Its own bar is below theirs, with a stem from each. For
// a single GPU there is no bar. It returns the lower edge of the bar or of the GPU's card.
func drawBars(b *svg, s *scene, l *layout, g *group) (bottom int) {
	if len(g.children) == 0 {
		return l.cards + l.cardHeight
	}
	var tops []int // of the stems
	for _, c := range g.children {
		tops = append(tops, drawBars(b, s, l, c))
	}
	x0, x1 := l.extent(g.gpus)
	y := l.barY(g.level)
	class, label, path := strings.ToLower(g.path.String()), barLabels[g.path], g.path.String()
	switch g.level {
	case s.root.level:
		x0, x1, y = l.left, l.right, y+2*barGap // below the frames
		class, label = "system", "between NUMA nodes (SYS)"
		if g.path == gpu.PathUnknown {
			label = "path between NUMA nodes unknown"
		}
	case s.root.level - 1:
		class, label = "node", s.numaName(g)
		if g.path == gpu.PathNode {
			label += " (NODE)"
		}
	}
	b.group("bar", "", []attribute{{"path", path}, {"gpus", s.indices(g.gpus)}}, func() {
		for i, c := range g.children {
			c0, c1 := l.extent(c.gpus)
			x := (c0 + c1) / 2
			b.path("stem", 0, fmt.Sprintf("M%d %dL%d %d", x, tops[i], x, y))
		}
		b.rect("bar "+class, box{x0, y, x1 - x0, barHeight}, 4)
		b.centred("on-bar", (x0+x1)/2, y+14, 11, plain, fit(label, x1-x0-8, 11, plain))
	})
	return y + barHeight
}

// drawFabric draws a bar for the NVSwitches that connect GPUs, and the NVLinks of each GPU to them.
func drawFabric(b *svg, s *scene, l *layout, fabric int) {
	at, gpus := l.fabrics[fabric], s.fabrics[fabric]
	y := l.fabricY(at.lane)
	for _, p := range gpus {
		links := 0 // the largest number that a GPU has
		for _, other := range gpus {
			if link := s.links.between(p, other); link.Switched {
				links = max(links, link.NVLinks)
			}
		}
		index, x := strconv.Itoa(s.gpu(p).Index), l.exit(s, p, toSwitches)
		title := fmt.Sprintf("GPU %s: %s to the NVSwitches", index, wording.Count(links, "NVLink"))
		data := []attribute{{"gpus", index}, {"nvlinks", strconv.Itoa(links)}, {"switched", "true"}}
		b.group("nvlink", title, data, func() {
			b.path("nv", min(3+links*2/3, 16), fmt.Sprintf("M%d %dL%d %d", x, y+fabricHeight, x, l.cards))
			drawNumber(b, x, l.bundles+bundleHeight/2, links)
		})
	}
	b.group("nvswitch", "", []attribute{{"gpus", s.indices(gpus)}}, func() {
		b.rect("fabric", box{at.x0, y, at.x1 - at.x0, fabricHeight}, 6)
		b.centred("on-fabric", (at.x0+at.x1)/2, y+17, 12, bold, "NVSwitch")
	})
}

// drawNVLinks draws the NVLinks that connect two GPUs directly. The numbers are drawn last, so that no other link
// covers them.
func drawNVLinks(b *svg, s *scene, l *layout) {
	for i, pair := range s.direct {
		link, at := s.links[pair], l.brackets[i]
		y, stroke := l.bracketY(at.lane), min(2*link.NVLinks, 10)
		title := fmt.Sprintf("GPU %d and GPU %d: %s", link.A, link.B, wording.Count(link.NVLinks, "NVLink"))
		gpus := fmt.Sprintf("%d %d", link.A, link.B)
		data := []attribute{{"gpus", gpus}, {"nvlinks", strconv.Itoa(link.NVLinks)}, {"switched", "false"}}
		b.group("nvlink", title, data, func() {
			drawBracket(b, "halo", stroke+4, at.x0, at.x1, y, l.cards-pad-2) // ends above the frames
			drawBracket(b, "nv", stroke, at.x0, at.x1, y, l.cards)
		})
	}
	for i, pair := range s.direct {
		at := l.brackets[i]
		drawNumber(b, (at.x0+at.x1)/2, l.bracketY(at.lane), s.links[pair].NVLinks)
	}
}

// drawBracket draws a line up, to the right and down, with round corners.
func drawBracket(b *svg, class string, stroke, x0, x1, top, bottom int) {
	const r = 6 // radius
	b.path(class, stroke, fmt.Sprintf("M%d %dL%d %dQ%d %d %d %dL%d %dQ%d %d %d %dL%d %d",
		x0, bottom, x0, top+r, x0, top, x0+r, top, x1-r, top, x1, top, x1, top+r, x1, bottom))
}

// drawNumber draws the number of NVLinks in the middle of their line.
func drawNumber(b *svg, x, y, links int) {
	label := strconv.Itoa(links)
	w := textWidth(label, 11, bold) + 8
	b.rect("pill", box{x - w/2, y - 7, w, 14}, 7)
	b.centred("on-pill", x, y+4, 11, bold, label)
}

// drawLegend draws the text below the drawing: the unusable GPUs, the containers with their letters, and how to read
// the drawing. It returns the lower end of the text.
func drawLegend(b *svg, s *scene, width, y int) (bottom int) {
	for _, d := range s.unusable() {
		drawCross(b, margin+6, y+8, 4)
		y = b.lines("bad", fmt.Sprintf("GPU %d is unusable: %s", d.Index, clean(d.Error)), margin+18, y, width-18) + 4
	}
	for i, h := range s.holders {
		b.group("holder", "", []attribute{{"holder", h.name}}, func() {
			end := drawBadge(b, s, []use{{i, 1}}, margin, y+1, width) + 8
			y = b.lines("plain", h.name+": "+h.devices, end, y, width+margin-end) + 4
		})
	}
	y += barGap
	for _, note := range notes(s) {
		y = b.lines("faint", note, margin, y, width)
	}
	return y
}

// notes returns what is unknown, how to read the drawing, and what the drawing cannot show.
func notes(s *scene) []string {
	var notes []string
	if s.HoldersUnknown != "" {
		notes = append(notes, "The holders of the devices are unknown: "+clean(s.HoldersUnknown)+".")
	}
	if len(s.Snapshot.Devices) > 1 {
		notes = append(notes, "PCIe: two GPUs are connected through the first bar below that spans both.")
	}
	if len(s.fabrics) > 0 || len(s.direct) > 0 {
		notes = append(notes, "NVLink: the number on a line is how many links it has.")
	}
	if slices.ContainsFunc(s.Snapshot.Devices, func(d gpu.Device) bool { return len(d.MIG) > 0 }) {
		notes = append(notes, "MIG: a device is as high as its share of the GPU's memory.")
	}
	var pairs []string
	for _, p := range notInTree(s.root, s.links) {
		pairs = append(pairs, fmt.Sprintf("%d-%d %s", s.gpu(p[0]).Index, s.gpu(p[1]).Index, s.links[p].PCIe))
	}
	if len(pairs) > 0 {
		notes = append(notes, "The driver's PCIe paths do not form a tree. These pairs are farther apart than drawn: "+
			strings.Join(pairs, ", ")+".")
	}
	return notes
}

// indices returns the indices of GPUs for a data attribute.
func (s *scene) indices(gpus []int) string {
	var list []string
	for _, p := range gpus {
		list = append(list, strconv.Itoa(s.gpu(p).Index))
	}
	return strings.Join(list, " ")
}
