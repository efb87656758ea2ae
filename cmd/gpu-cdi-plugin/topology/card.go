package topology

import (
	"fmt"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// drawCard draws the card of a GPU in a box, and returns the height that the card needs.
func drawCard(b *svg, s *scene, i int, at box) (height int) {
	d, class, state := s.gpu(i), "card", "ok"
	if !d.Usable() {
		class, state = "card lost", "unusable"
	}
	data := []attribute{{"gpu", strconv.Itoa(d.Index)}, {"pci", clean(d.PCIBusID)}, {"state", state}}
	b.group("gpu", s.describeGPU(d), data, func() {
		b.rect(class, at, 6)
		const width = cardWidth - 16
		x, y := at.x+8, at.y+8
		line := func(class, value string, size int, f font) {
			if value != "" {
				y += size + 5
				b.text(text{class: class, x: x, y: y - 3, size: size, font: f, value: fit(value, width, size, f)})
			}
		}
		name := "GPU " + strconv.Itoa(d.Index)
		line("name", name, 13, bold)
		memory := fmt.Sprintf("%.0f GiB", float64(d.MemoryBytes)/(1<<30))
		switch {
		case !d.Usable():
			drawCross(b, x+width-6, at.y+14, 5)
		case d.MemoryBytes > 0 && textWidth(name, 13, bold)+4+textWidth(memory, 10, plain) <= width:
			b.text(text{class: "faint", x: x + width, y: y - 3, size: 10, anchor: "end", value: memory})
		}
		line("plain", model(d), 10, plain)
		line("faint", clean(d.PCIBusID), 11, mono)
		if !d.Usable() {
			line("bad", "unusable", 10, bold)
		}
		if uses := s.uses[d.UUID]; len(uses) > 0 {
			end := drawBadge(b, s, uses, x, y+4, width) + 4
			if len(uses) == 1 {
				pod := fit(s.holders[uses[0].holder].pod, x+width-end, 10, plain)
				b.text(text{class: "plain", x: end, y: y + 15, size: 10, value: pod})
			}
			y += 20
		} else if s.HoldersUnknown == "" && d.Usable() && !d.MIGEnabled {
			line("faint", "free", 10, plain)
		}
		if d.MIGEnabled && len(d.MIG) == 0 {
			line("faint", "no MIG devices", 10, plain)
		}
		for j := range d.MIG {
			if d.MIGEnabled {
				y = drawMIG(b, s, d, &d.MIG[j], box{x: x - 2, y: y + 2, w: width + 4})
			}
		}
		height = y + 6 - at.y
	})
	return height
}

// describeGPU describes a GPU and its holders as text.
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

// model returns a GPU's product name without the vendor.
func model(d *gpu.Device) string {
	name := clean(d.Name)
	for _, brand := range []string{"NVIDIA ", "Tesla ", "GeForce "} {
		name = strings.TrimPrefix(name, brand)
	}
	return name
}

// drawMIG draws a MIG device and returns its lower edge. Its height is its share of the GPU's memory, but at least the
// height of its name.
func drawMIG(b *svg, s *scene, d *gpu.Device, m *gpu.MIGDevice, at box) (bottom int) {
	const wholeGPU, least = 112, 16
	siblings := 0 // compute instances that share the memory of the GPU instance
	for i := range d.MIG {
		if d.MIG[i].GPUInstance == m.GPUInstance {
			siblings++
		}
	}
	share := min(float64(m.MemoryBytes)/float64(max(d.MemoryBytes, 1)), 1) / float64(siblings)
	at.h = max(least, int(share*wholeGPU))
	id, profile := fmt.Sprintf("%d:%d", d.Index, m.Index), clean(m.Profile)
	title := fmt.Sprintf("MIG device %s, %s, %s%s", id, profile, clean(m.UUID), s.heldBy(m.UUID))
	b.group("mig", title, []attribute{{"mig", id}, {"profile", profile}}, func() {
		b.rect("slice", at, 3)
		end := at.x + 2
		if uses := s.uses[m.UUID]; len(uses) > 0 {
			end = drawBadge(b, s, uses, end, at.y+at.h/2-7, at.w/2)
		}
		b.text(text{
			class: "on-slice", x: end + 3, y: at.y + at.h/2 + 4, size: 10,
			value: fit(fmt.Sprintf("%d: %s", m.Index, profile), at.x+at.w-end-5, 10, plain),
		})
	})
	return at.y + at.h
}

// drawBadge draws a badge with the letters of the containers that hold a device, and the number of replicas if there
// are several. It returns the right end of the badge.
func drawBadge(b *svg, s *scene, uses []use, x, y, room int) (end int) {
	var letters []string
	for _, u := range uses {
		letter := s.holders[u.holder].letter
		if u.replicas > 1 {
			letter += "×" + strconv.Itoa(u.replicas)
		}
		letters = append(letters, letter)
	}
	class := "shared"
	if len(uses) == 1 {
		class = "holder" + strconv.Itoa(uses[0].holder%8)
	}
	label := fit(strings.Join(letters, " "), room-8, 10, bold)
	w := max(textWidth(label, 10, bold)+8, 16)
	b.rect("badge "+class, box{x, y, w, 14}, 7)
	b.centred("on-badge", x+w/2, y+11, 10, bold, label)
	return x + w
}

// drawCross draws a cross over an unusable device.
func drawCross(b *svg, x, y, r int) {
	b.path("cross", 0, fmt.Sprintf("M%d %dL%d %d", x-r, y-r, x+r, y+r))
	b.path("cross", 0, fmt.Sprintf("M%d %dL%d %d", x-r, y+r, x+r, y-r))
}
