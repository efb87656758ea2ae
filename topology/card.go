package topology

import (
	"fmt"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// card is a GPU's card. What is on it has positions from the card's upper left corner.
type card struct {
	box
	texts  []text
	badges badges
	migs   []migPosition
}

// migPosition is where a MIG device is on its card.
type migPosition struct {
	box
	device *gpu.MIGDevice
	label  text
	badges badges
}

// badges are the letters of the pods that hold a device, side by side.
type badges struct {
	x, y, width int
	list        []badge
	rest        text // how many more there are, or the name of the only pod
}

type badge struct {
	box
	pod    int
	letter string
}

// newCard makes a card that is as high as what is on it.
func newCard(s *scene, i int) card {
	d, width, inset, size := s.gpu(i), s.cardWidth, 8, 10
	c := card{box: box{w: width, h: 10}}
	if s.small {
		inset, size, c.h = 6, 9, 6
	}
	add := func(class, value string, size int, f font, below int) {
		c.h += size
		c.texts = append(c.texts, text{class: class, x: inset, y: c.h, size: size, font: f, value: value})
		c.h += below
	}
	if s.small {
		add("name", fit(strconv.Itoa(d.Index), width-24, 13, bold), 13, bold, 5)
		if len(modelsOf(s.Snapshot)) > 1 && d.Name != "" {
			add("plain", fit(model(d), width-12, 9, plain), 9, plain, 4)
		}
		if d.PCIBusID != "" {
			add("faint", fit(shortAddress(s.Snapshot, clean(d.PCIBusID)), width-12, 9, mono), 9, mono, 4)
		}
	} else {
		name := "GPU " + strconv.Itoa(d.Index)
		add("name", name, 14, bold, 8)
		if memory := fmt.Sprintf("%.0f GiB", float64(d.MemoryBytes)/(1<<30)); d.MemoryBytes > 0 && d.Usable() &&
			textWidth(name, 14, bold)+textWidth(memory, 10, plain)+4 <= width-16 {
			c.texts = append(c.texts, text{
				class: "faint", x: inset + width - 16, y: c.texts[0].y, size: 10, anchor: "end", value: memory,
			})
		}
		for _, line := range wrap(model(d), width-16, 11, 2) {
			add("plain", line, 11, plain, 5)
		}
		if d.PCIBusID != "" {
			add("faint", fit(clean(d.PCIBusID), width-16, 11, mono), 11, mono, 5)
		}
	}
	if !d.Usable() {
		add("bad", choose(width-12, size, bold, "unusable", "lost"), size, bold, 4)
		if !s.small {
			for _, line := range wrap(clean(d.Error), width-16, size, 3) {
				add("bad", line, size, plain, 4)
			}
		}
	}
	if uses := s.uses[d.UUID]; len(uses) > 0 {
		c.badges = newBadges(s, uses, width-16, !s.small)
		c.badges.x, c.badges.y = inset, c.h+4
		c.h += 22
	} else if s.HoldersUnknown == "" && d.Usable() && !d.MIGEnabled {
		add("faint", "free", size, plain, 4)
	}
	if d.MIGEnabled {
		c.h += 2
		if len(d.MIG) == 0 {
			add("faint", choose(width-12, 9, plain, "MIG on, no devices", "no MIG dev.", "MIG"), 9, plain, 4)
		}
		for i := range d.MIG {
			m := newMIGPosition(s, d, &d.MIG[i], box{inset - 2, c.h, width - 2*inset + 4, 0}, size)
			c.migs = append(c.migs, m)
			c.h += m.h + 2
		}
	}
	c.h += 4
	return c
}

// newMIGPosition makes a MIG device as high as its share of the GPU's memory, but high enough for its name.
func newMIGPosition(s *scene, d *gpu.Device, m *gpu.MIGDevice, at box, size int) migPosition {
	const wholeGPU, least = 112, 16
	at.h = least
	if d.MemoryBytes > 0 {
		siblings := 0 // compute instances that share the memory of the GPU instance
		for i := range d.MIG {
			if d.MIG[i].GPUInstance == m.GPUInstance {
				siblings++
			}
		}
		share := min(float64(m.MemoryBytes)/float64(d.MemoryBytes), 1) / float64(siblings)
		at.h = max(least, int(share*wholeGPU))
	}
	p := migPosition{box: at, device: m, badges: newBadges(s, s.uses[m.UUID], at.w/3, false)}
	p.badges.x, p.badges.y = at.x+at.w-p.badges.width-2, at.y+at.h/2-7
	profile, room := clean(m.Profile), at.w-8-p.badges.width
	label := choose(room, size, plain, strconv.Itoa(m.Index)+": "+profile, profile)
	if label == "" {
		label = fit(profile, room, size, plain)
	}
	p.label = text{class: "on-slice", x: at.x + 4, y: at.y + at.h/2 + 4, size: size, value: label}
	return p
}

// newBadges makes as many badges as there is room for. With named, a single one has the pod's name beside it.
func newBadges(s *scene, uses []use, room int, named bool) badges {
	var b badges
	x := 0
	for i, u := range uses {
		next := newBadge(s, u, x)
		more := ""
		if i+1 < len(uses) {
			more = "+" + strconv.Itoa(len(uses)-i-1)
		}
		if i > 0 && x+next.w+2+textWidth(more, 9, plain) > room {
			b.rest = text{class: "faint", x: x, y: 11, size: 9, value: "+" + strconv.Itoa(len(uses)-i)}
			b.width = x + textWidth(b.rest.value, 9, plain)
			return b
		}
		b.list = append(b.list, next)
		b.width = x + next.w
		x += next.w + 2
	}
	if named && len(uses) == 1 {
		_, name, _ := strings.Cut(s.pods[uses[0].pod].name, "/")
		b.rest = text{class: "plain", x: x + 2, y: 11, size: 10, value: fit(name, room-x-2, 10, plain)}
	}
	return b
}

// newBadge makes the badge of a pod. Several replicas are counted on it.
func newBadge(s *scene, u use, x int) badge {
	label := s.pods[u.pod].letter
	if u.replicas > 1 {
		label += "×" + strconv.Itoa(u.replicas)
	}
	return badge{box{x, 0, max(textWidth(label, 10, bold)+8, 16), 14}, u.pod, label}
}

// model returns a GPU's product name without the maker.
func model(d *gpu.Device) string {
	return strings.TrimPrefix(strings.TrimPrefix(clean(d.Name), "NVIDIA "), "Tesla ")
}

// shortAddress shortens a PCI address: without function 0, and without the domain if all GPUs are in one.
func shortAddress(s *gpu.Snapshot, address string) string {
	short := strings.TrimSuffix(address, ".0")
	for i := range s.Devices {
		other := s.Devices[i].PCIBusID
		if other != "" && (len(other) < 5 || len(address) < 5 || other[:5] != address[:5]) {
			return short
		}
	}
	return short[min(5, len(short)):]
}
