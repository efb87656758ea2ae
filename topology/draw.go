package topology

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// draw writes the shapes of a scene at their positions.
func draw(s *scene, p *positions) []byte {
	b := &svg{}
	b.begin(p.width, p.height, s.title(), s.description())
	b.rect("page", box{w: p.width, h: p.height}, 0)
	for i, g := range s.tree {
		data := []attribute{{"numa", s.numaName(g)}, {"gpus", s.indices(g.gpus)}}
		b.group("numa", s.numaName(g), data, func() { b.rect("frame", p.frames[i], 8) })
	}
	for _, bar := range p.bars {
		drawBar(b, s, bar)
	}
	for i, f := range p.fabrics {
		drawFabric(b, s, s.fabrics[i], f)
	}
	drawNVLinks(b, p.nvlinks)
	for i, c := range p.cards {
		drawCard(b, s, s.gpu(i), c)
	}
	drawLegend(b, s, p.legend)
	room := p.width - 2*margin
	b.text(text{class: "title", x: margin, y: margin + 14, size: 18, font: bold, value: fit(s.title(), room, 18, bold)})
	b.text(text{class: "faint", x: margin, y: margin + 34, size: 12, value: fit(s.subtitle(), room, 12, plain)})
	b.end()
	return b.Bytes()
}

// barLabels are what a bar stands for, from long to short.
var barLabels = map[gpu.PCIePath][]string{
	gpu.PathSameBoard:        {"one board (PSB)", "board", "PSB"},
	gpu.PathSingleSwitch:     {"PCIe switch (PIX)", "PCIe switch", "PIX"},
	gpu.PathMultipleSwitches: {"PCIe switches (PXB)", "PCIe switches", "PXB"},
	gpu.PathHostBridge:       {"host bridge (PHB)", "host bridge", "PHB"},
}

func drawBar(b *svg, s *scene, bar bar) {
	path, class := bar.group.path.String(), strings.ToLower(bar.group.path.String())
	labels, gpus := barLabels[bar.group.path], s.gpuNames(bar.group.gpus)
	switch bar.kind {
	case numaBar:
		name := s.numaName(bar.group)
		class, labels = "node", []string{name, strings.ReplaceAll(name, "NUMA node", "NUMA")}
		if bar.group.path == gpu.PathNode {
			labels = append([]string{name + ", across its host bridges (NODE)", name + " (NODE)"}, labels...)
		} else {
			path = ""
		}
	case systemBar:
		class, gpus, labels = "system", "all GPUs", []string{"between NUMA nodes (SYS)", "SYS"}
		if bar.group.path != gpu.PathSystem {
			labels = []string{"path between NUMA nodes unknown", "path unknown", "?"}
		}
	}
	data := []attribute{{"path", path}, {"gpus", s.indices(bar.group.gpus)}}
	b.group("bar", labels[0]+": "+gpus, data, func() {
		for i, part := range bar.parts {
			if part.spine != nil {
				b.path("spine", 8, part.spine.points()...)
			}
			for _, st := range part.stems {
				b.path("stem", 0, st.points()...)
			}
			b.rect("bar "+class, part.box, 4)
			var choices []string
			if len(bar.parts) > 1 && bar.kind != systemBar {
				for _, label := range labels {
					choices = append(choices, fmt.Sprintf("%s, part %d of %d", label, i+1, len(bar.parts)))
				}
			}
			label := choose(part.w-8, 11, plain, append(choices, labels...)...)
			b.centred("on-bar", part.x+part.w/2, part.y+14, 11, plain, label)
		}
	})
}

func (s stem) points() []point { return []point{{s.x, s.top}, {s.x, s.bottom}} }

func drawFabric(b *svg, s *scene, f fabric, at fabricPosition) {
	for _, u := range at.bundles {
		links := f.ports[u.gpu]
		index := strconv.Itoa(s.gpu(u.gpu).Index)
		title := fmt.Sprintf("GPU %s: %s to the NVSwitches", index, plural(links, "NVLink"))
		data := []attribute{{"gpus", index}, {"nvlinks", strconv.Itoa(links)}, {"switched", "true"}}
		b.group("nvlink", title, data, func() {
			b.path("nv", min(3+links*2/3, 16), u.points()...)
			drawNumber(b, point{u.x, u.top + bundleHeight/2}, links)
		})
	}
	title := "NVSwitches connect " + s.gpuNames(f.gpus) + ", with " + f.width() + " each"
	b.group("nvswitch", title, []attribute{{"gpus", s.indices(f.gpus)}}, func() {
		if last := len(at.bars) - 1; last > 0 {
			x := at.bars[0].x + 4
			b.path("nvspine", 8, point{x, at.bars[0].y + fabricHeight/2}, point{x, at.bars[last].y + fabricHeight/2})
		}
		for _, bar := range at.bars {
			links := "NVSwitch, " + f.width()
			label := choose(bar.w-8, 12, bold, links+" from each GPU", links, "NVSwitch", "NVS")
			b.rect("fabric", bar, 6)
			b.centred("on-fabric", bar.x+bar.w/2, bar.y+17, 12, bold, label)
		}
	})
}

// drawNVLinks draws the direct NVLinks. Their numbers come last, so that no other link covers them.
func drawNVLinks(b *svg, list []nvlinkPosition) {
	for _, at := range list {
		l := at.link
		stroke := min(2*l.NVLinks, 10)
		title := fmt.Sprintf("GPU %d and GPU %d: %s", l.A, l.B, plural(l.NVLinks, "NVLink"))
		data := []attribute{
			{"gpus", fmt.Sprintf("%d %d", l.A, l.B)}, {"nvlinks", strconv.Itoa(l.NVLinks)}, {"switched", "false"},
		}
		b.group("nvlink", title, data, func() {
			halo := slices.Clone(at.points) // ends above the cards
			halo[0][1] -= pad + 2
			halo[len(halo)-1][1] -= pad + 2
			b.path("halo", stroke+4, halo...)
			b.path("nv", stroke, at.points...)
		})
	}
	for _, at := range list {
		drawNumber(b, at.number, at.link.NVLinks)
	}
}

// drawNumber draws the number of NVLinks in the middle of their line.
func drawNumber(b *svg, at point, links int) {
	label := strconv.Itoa(links)
	w := textWidth(label, 11, bold) + 10
	b.rect("pill", box{at[0] - w/2, at[1] - 7, w, 14}, 7)
	b.centred("on-pill", at[0], at[1]+4, 11, bold, label)
}

func drawCard(b *svg, s *scene, d *gpu.Device, at card) {
	class, state := "card", "ok"
	if !d.Usable() {
		class, state = "card lost", "unusable"
	}
	data := []attribute{{"gpu", strconv.Itoa(d.Index)}, {"pci", clean(d.PCIBusID)}, {"state", state}}
	b.group("gpu", s.describeGPU(d), data, func() {
		b.rect(class, at.box, 6)
		if !d.Usable() {
			drawCross(b, at.x+at.w-14, at.y+14, 5)
		}
		b.texts(at.texts, at.x, at.y)
		drawBadges(b, at.badges, at.x, at.y)
		for _, m := range at.migs {
			id, profile := fmt.Sprintf("%d:%d", d.Index, m.device.Index), clean(m.device.Profile)
			title := fmt.Sprintf("MIG device %s, %s, %s%s", id, profile, clean(m.device.UUID), s.heldBy(m.device.UUID))
			b.group("mig", title, []attribute{{"mig", id}, {"profile", profile}}, func() {
				b.rect("slice", box{at.x + m.x, at.y + m.y, m.w, m.h}, 3)
				b.text(m.label.moved(at.x, at.y))
				drawBadges(b, m.badges, at.x, at.y)
			})
		}
	})
}

// describeGPU returns a GPU as text, with its holders.
func (s *scene) describeGPU(d *gpu.Device) string {
	parts := []string{"GPU " + strconv.Itoa(d.Index)}
	for _, s := range []string{clean(d.Name), clean(d.PCIBusID)} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	if d.NUMANode >= 0 {
		parts = append(parts, "NUMA node "+strconv.Itoa(d.NUMANode))
	}
	if !d.Usable() {
		parts = append(parts, "unusable: "+clean(d.Error))
	}
	return strings.Join(parts, ", ") + s.heldBy(d.UUID)
}

func drawBadges(b *svg, at badges, dx, dy int) {
	x, y := at.x+dx, at.y+dy
	for _, badge := range at.list {
		b.group("", "", nil, func() {
			b.rect("badge pod"+strconv.Itoa(badge.pod%8), box{x + badge.x, y, badge.w, badge.h}, 7)
			b.centred("on-badge", x+badge.x+badge.w/2, y+11, 10, bold, badge.letter)
		})
	}
	b.text(at.rest.moved(x, y))
}

// drawCross marks what cannot be used.
func drawCross(b *svg, x, y, r int) {
	b.path("cross", 0, point{x - r, y - r}, point{x + r, y + r})
	b.path("cross", 0, point{x - r, y + r}, point{x + r, y - r})
}

func drawLegend(b *svg, s *scene, l legend) {
	for _, texts := range l.unusable {
		drawCross(b, margin+6, texts[0].y-4, 4)
		b.texts(texts, 0, 0)
	}
	for _, at := range l.pods {
		p := s.pods[at.pod]
		b.group("holder", p.name+" holds "+p.deviceText(), []attribute{{"pod", p.name}}, func() {
			drawBadges(b, at.badge, 0, 0)
			b.texts(at.texts, 0, 0)
		})
	}
	b.texts(l.notes, 0, 0)
}

// indices returns GPUs by index, for a data attribute.
func (s *scene) indices(gpus []int) string {
	var list []string
	for _, p := range gpus {
		list = append(list, strconv.Itoa(s.gpu(p).Index))
	}
	return strings.Join(list, " ")
}
