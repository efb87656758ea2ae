package topology

import (
	"fmt"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// card is what stands on a GPU's card: rows of words below each other, then its MIG devices.
type card struct {
	rows   []row
	slices []slice
	h      int
}

// row is a line of words on a card, y from the card's upper edge.
type row struct {
	text  Text
	right string // at the other end of the row
	marks []mark
}

// slice is a MIG device on a card.
type slice struct {
	mig   *gpu.MIGDevice
	y, h  int
	marks []mark
}

// card decides what is on a GPU's card, and so how high it is.
func (l *layout) card(i int) card {
	d := &l.s.Devices[i]
	if l.small {
		return l.smallCard(d)
	}
	c := card{h: 10}
	memory := ""
	if d.MemoryBytes > 0 && d.Usable() {
		memory = fmt.Sprintf("%.0f GiB", float64(d.MemoryBytes)/(1<<30))
	}
	c.add("name", "GPU "+strconv.Itoa(d.Index), 14, bold, 8)
	c.rows[0].right = memory
	for _, part := range wrap(model(d), l.cardW-16, 11, 2) {
		c.add("plain", part, 11, plain, 5)
	}
	if d.PCIBusID != "" {
		c.add("faint", fit(clean(d.PCIBusID), l.cardW-16, 11, mono), 11, mono, 5)
	}
	l.finish(&c, d, 10, 3)
	return c
}

func (l *layout) smallCard(d *gpu.Device) card {
	c := card{h: 6}
	c.add("name", fit(strconv.Itoa(d.Index), l.cardW-24, 13, bold), 13, bold, 5)
	if len(modelsOf(l.s)) > 1 && d.Name != "" {
		c.add("plain", fit(model(d), l.cardW-12, 9, plain), 9, plain, 4)
	}
	if d.PCIBusID != "" {
		c.add("faint", fit(l.shortAddress(clean(d.PCIBusID)), l.cardW-12, 9, mono), 9, mono, 4)
	}
	l.finish(&c, d, 9, 0)
	return c
}

// finish adds the GPU's state, its holders and its MIG devices.
func (l *layout) finish(c *card, d *gpu.Device, size, reasonLines int) {
	if !d.Usable() {
		c.add("bad", choose(l.cardW-12, size, bold, "unusable", "lost"), size, bold, 4)
		if reasonLines > 0 {
			for _, part := range wrap(clean(d.Error), l.cardW-16, size, reasonLines) {
				c.add("bad", part, size, plain, 4)
			}
		}
	}
	if marks := l.pods.marks(d.UUID); len(marks) > 0 {
		c.h += 16
		c.rows = append(c.rows, row{text: Text{Y: c.h}, marks: marks})
		c.h += 6
	} else if l.pods.known && d.Usable() && !d.MIGEnabled {
		c.add("faint", "free", size, plain, 4)
	}
	l.addSlices(c, d)
	c.h += 4
}

func (c *card) add(class, s string, size int, f font, below int) {
	c.h += size
	c.rows = append(c.rows, row{text: Text{Class: class, Y: c.h, Size: size, Font: f, String: s}})
	c.h += below
}

// addSlices stacks the MIG devices, each as high as its share of the memory, but high enough for its name.
func (l *layout) addSlices(c *card, d *gpu.Device) {
	if !d.MIGEnabled {
		return
	}
	c.h += 2
	if len(d.MIG) == 0 {
		c.add("faint", choose(l.cardW-12, 9, plain, "MIG on, no devices", "no MIG dev.", "MIG"), 9, plain, 4)
	}
	for i := range d.MIG {
		m := &d.MIG[i]
		h := 16
		if d.MemoryBytes > 0 {
			share := min(float64(m.MemoryBytes)/float64(d.MemoryBytes), 1) / float64(siblings(d, m))
			h = max(h, int(share*mostMIGHeight))
		}
		c.slices = append(c.slices, slice{mig: m, y: c.h, h: h, marks: l.pods.marks(m.UUID)})
		c.h += h + 2
	}
}

// siblings counts the compute instances that share the memory of a MIG device's GPU instance, itself included.
func siblings(d *gpu.Device, m *gpu.MIGDevice) int {
	n := 0
	for i := range d.MIG {
		if d.MIG[i].GPUInstance == m.GPUInstance {
			n++
		}
	}
	return n
}

// drawCard draws a GPU where its place is.
func (l *layout) drawCard(i int) {
	d, c, at := &l.s.Devices[i], &l.cards[i], l.at[i]
	inset := 8
	if l.small {
		inset = 6
	}
	thing := Group{
		Class: "gpu", Title: l.describeGPU(d),
		Data: [][2]string{{"gpu", strconv.Itoa(d.Index)}, {"pci", clean(d.PCIBusID)}, {"state", state(d)}},
	}
	class := "card"
	if !d.Usable() {
		class = "card lost"
	}
	thing.Shapes = append(thing.Shapes, Rect{Class: class, X: at.x, Y: at.line.cards, W: l.cardW, H: at.line.h, CornerRadius: 6})
	if !d.Usable() {
		thing.Shapes = append(thing.Shapes, cross(at.x+l.cardW-14, at.line.cards+14, 5)...)
	}
	for _, r := range c.rows {
		thing.Shapes = append(thing.Shapes, l.drawRow(r, at.x+inset, at.line.cards)...)
	}
	for _, s := range c.slices {
		thing.Shapes = append(thing.Shapes, l.drawSlice(d, s, at.x+inset-2, at.line.cards)...)
	}
	l.front = append(l.front, thing)
}

func (l *layout) drawRow(r row, x, y int) []Shape {
	room := l.cardW - 16
	if r.marks != nil {
		return l.drawMarks(r.marks, x, y+r.text.Y-12, room, !l.small)
	}
	t := r.text
	t.X, t.Y = x, t.Y+y
	shapes := []Shape{t}
	if r.right != "" && width(t.String, t.Size, t.Font)+width(r.right, 10, plain)+4 <= room {
		shapes = append(shapes, Text{Class: "faint", X: x + room, Y: t.Y, Size: 10, Anchor: End, String: r.right})
	}
	return shapes
}

// drawSlice draws a MIG device: its name to the left, its holders to the right.
func (l *layout) drawSlice(d *gpu.Device, s slice, x, y int) []Shape {
	w := l.cardW - 2*(x-l.at[l.position(d)].x)
	size := 10
	if l.small {
		size = 9
	}
	name := clean(s.mig.Profile)
	title := fmt.Sprintf("MIG device %d:%d, %s, %s", d.Index, s.mig.Index, name, clean(s.mig.UUID))
	badges := l.drawMarks(s.marks, 0, 0, w/3, false)
	room := w - 8 - marksWidth(badges)
	label := choose(room, size, plain, strconv.Itoa(s.mig.Index)+": "+name, name)
	if label == "" {
		label = fit(name, room, size, plain)
	}
	shapes := []Shape{
		Rect{Class: "slice", X: x, Y: y + s.y, W: w, H: s.h, CornerRadius: 3},
		Text{Class: "on-slice", X: x + 4, Y: y + s.y + s.h/2 + 4, Size: size, String: label},
	}
	shapes = append(shapes, l.drawMarks(s.marks, x+w-marksWidth(badges)-2, y+s.y+s.h/2-7, w/3, false)...)
	return []Shape{Group{
		Class: "mig", Title: title + l.pods.heldBy(s.mig.UUID),
		Data:   [][2]string{{"mig", fmt.Sprintf("%d:%d", d.Index, s.mig.Index)}, {"profile", name}},
		Shapes: shapes,
	}}
}

func (l *layout) position(d *gpu.Device) int {
	for i := range l.s.Devices {
		if d == &l.s.Devices[i] {
			return i
		}
	}
	return -1
}

// cross is the sign of a GPU that cannot be used.
func cross(x, y, r int) []Shape {
	return []Shape{
		Path{Class: "cross", Points: [][2]int{{x - r, y - r}, {x + r, y + r}}},
		Path{Class: "cross", Points: [][2]int{{x - r, y + r}, {x + r, y - r}}},
	}
}

func state(d *gpu.Device) string {
	if d.Usable() {
		return "ok"
	}
	return "unusable"
}

// model is the product's name without what all have in common.
func model(d *gpu.Device) string {
	name := clean(d.Name)
	for _, maker := range []string{"NVIDIA ", "Tesla "} {
		name = strings.TrimPrefix(name, maker)
	}
	return name
}

// describeGPU says all about a GPU in words.
func (l *layout) describeGPU(d *gpu.Device) string {
	parts := []string{fmt.Sprintf("GPU %d", d.Index)}
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
	return strings.Join(parts, ", ") + l.pods.heldBy(d.UUID)
}

// shortAddress leaves out what all PCI addresses of the node have in common: the domain, and the function 0.
func (l *layout) shortAddress(address string) string {
	for i := range l.s.Devices {
		other := l.s.Devices[i].PCIBusID
		if other != "" && (len(other) < 5 || len(address) < 5 || other[:5] != address[:5]) {
			return strings.TrimSuffix(address, ".0")
		}
	}
	return strings.TrimSuffix(address[5:], ".0")
}
