package topology

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

const (
	textLine = 18 // height of a line below the drawing, in pixels
	mostRows = 12 // of unusable GPUs, or pairs that do not fit; the others are counted
)

// legend is the text below the drawing: the unusable GPUs, the pods with their letters, and how to read the drawing.
type legend struct {
	unusable [][]text // with a cross in front of each
	pods     []podPosition
	notes    []text
	bottom   int
}

// podPosition is where a pod is listed.
type podPosition struct {
	pod   int
	badge badges
	texts []text
}

// newLegend finds the positions of the legend, from y on, in a column of that width.
func newLegend(s *scene, width, y int) legend {
	var l legend
	bad := s.unusable()
	for i, d := range bad[:min(len(bad), mostRows)] {
		words := fmt.Sprintf("GPU %d is unusable: %s", d.Index, clean(d.Error))
		if i == mostRows-1 && len(bad) > mostRows {
			words = fmt.Sprintf("%d more GPUs are unusable", len(bad)-i)
		}
		var texts []text
		texts, y = textLines(wrap(words, width-18, 12, 3), "bad", margin+18, y)
		l.unusable = append(l.unusable, texts)
	}
	l.pods, y = listPods(s, width, y)
	y += barGap
	for _, note := range notes(s) {
		var texts []text
		texts, y = textLines(wrap(note, width, 12, 3), "faint", margin, y)
		l.notes = append(l.notes, texts...)
	}
	l.bottom = y
	return l
}

// textLines puts lines below each other, and returns where they end.
func textLines(lines []string, class string, x, y int) ([]text, int) {
	var texts []text
	for _, line := range lines {
		texts = append(texts, text{class: class, x: x, y: y + 12, size: 12, value: line})
		y += textLine
	}
	return texts, y
}

// listPods lists the pods in columns, and returns where the longest ends.
func listPods(s *scene, width, top int) ([]podPosition, int) {
	if len(s.pods) == 0 {
		return nil, top
	}
	top += barGap
	columns := max(width/480, 1)
	room := width / columns
	perColumn := (len(s.pods) + columns - 1) / columns
	var list []podPosition
	y, bottom := top, top
	for i, p := range s.pods {
		if i%perColumn == 0 {
			y = top
		}
		lines := wrap(p.name, room-52, 12, 4)
		for _, c := range p.containers {
			lines = append(lines, wrap(clean(c.Container)+": "+c.deviceText(), room-64, 12, 4)...)
		}
		at := podPosition{pod: i, badge: newBadges(s, []use{{i, 1}}, room, false)}
		at.badge.x, at.badge.y = margin+i/perColumn*room, y+1
		at.texts, y = textLines(lines, "faint", at.badge.x+at.badge.width+8, y)
		if len(at.texts) > 0 {
			at.texts[0].class = "plain"
		}
		y += 4
		list, bottom = append(list, at), max(bottom, y)
	}
	return list, bottom
}

// notes returns what is unknown, how to read the drawing, and what it cannot show.
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
	pairs := notInTree(s.tree, s.links)
	if len(pairs) == 0 {
		return notes
	}
	var words []string
	for _, p := range pairs[:min(len(pairs), mostRows)] {
		words = append(words, fmt.Sprintf("%d-%d %s", s.gpu(p[0]).Index, s.gpu(p[1]).Index, s.links.path(p[0], p[1])))
	}
	if len(pairs) > mostRows {
		words = append(words, fmt.Sprintf("and %d more", len(pairs)-mostRows))
	}
	return append(notes, "The driver's PCIe paths do not form a tree. These pairs are farther apart than drawn: "+
		strings.Join(words, ", ")+".")
}

// title returns the models of the GPUs.
func (s *scene) title() string {
	if models := modelsOf(s.Snapshot); len(models) > 0 {
		return strings.Join(models, ", ")
	}
	return plural(len(s.Snapshot.Devices), "GPU")
}

// modelsOf returns how many GPUs there are of each model, in the order of the first ones.
func modelsOf(s *gpu.Snapshot) []string {
	var names []string
	counts := map[string]int{}
	for i := range s.Devices {
		name := clean(s.Devices[i].Name)
		if name == "" {
			continue
		}
		if counts[name] == 0 {
			names = append(names, name)
		}
		counts[name]++
	}
	for i, name := range names {
		names[i] = fmt.Sprintf("%d × %s", counts[name], name)
	}
	return names
}

// subtitle returns the driver's version, and counts GPUs and pods.
func (s *scene) subtitle() string {
	var parts []string
	if v := clean(s.Snapshot.DriverVersion); v != "" {
		parts = append(parts, "driver "+v)
	}
	if v := clean(s.Snapshot.CUDAVersion); v != "" {
		parts = append(parts, "CUDA "+v)
	}
	gpus := plural(len(s.Snapshot.Devices), "GPU")
	if n := len(s.unusable()); n > 0 {
		parts = append(parts, fmt.Sprintf("%d of %s unusable", n, gpus))
	} else {
		parts = append(parts, gpus+" usable")
	}
	if s.HoldersUnknown == "" {
		verb := "hold"
		if len(s.pods) == 1 {
			verb = "holds"
		}
		parts = append(parts, plural(len(s.pods), "pod")+" "+verb+" devices")
	}
	return strings.Join(parts, " · ")
}

// description returns the content of the picture as text.
func (s *scene) description() string {
	parts := []string{s.subtitle() + "."}
	for _, numa := range s.tree {
		parts = append(parts, s.numaName(numa)+": "+s.gpuNames(numa.gpus)+".")
	}
	for _, f := range s.fabrics {
		parts = append(parts, "NVSwitches connect "+s.gpuNames(f.gpus)+", with "+f.width()+" each.")
	}
	if len(s.direct) > 0 {
		parts = append(parts, "NVLinks connect "+plural(len(s.direct), "pair")+" of GPUs directly.")
	}
	for _, d := range s.unusable() {
		parts = append(parts, fmt.Sprintf("GPU %d is unusable: %s.", d.Index, clean(d.Error)))
	}
	for _, p := range s.pods {
		parts = append(parts, "Pod "+p.name+" holds "+p.deviceText()+".")
	}
	return strings.Join(parts, "\n")
}

// numaName names a group after the NUMA nodes of its GPUs.
func (s *scene) numaName(g *group) string {
	var nodes []int
	for _, p := range g.gpus {
		if n := s.gpu(p).NUMANode; n >= 0 {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	switch nodes = slices.Compact(nodes); len(nodes) {
	case 0:
		return "NUMA node unknown"
	case 1:
		return "NUMA node " + strconv.Itoa(nodes[0])
	default:
		return "NUMA nodes " + ranges(nodes)
	}
}

// gpuNames returns GPUs as text, such as "GPUs 0-3, 5".
func (s *scene) gpuNames(gpus []int) string {
	var list []int
	for _, p := range gpus {
		list = append(list, s.gpu(p).Index)
	}
	slices.Sort(list)
	if len(list) == 1 {
		return "GPU " + ranges(list)
	}
	return "GPUs " + ranges(list)
}

// plural returns a number and what it counts.
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// ranges writes sorted numbers as "0-3, 5".
func ranges(list []int) string {
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		switch j - i {
		case 0:
			parts = append(parts, strconv.Itoa(list[i]))
		case 1:
			parts = append(parts, strconv.Itoa(list[i]), strconv.Itoa(list[j]))
		default:
			parts = append(parts, strconv.Itoa(list[i])+"-"+strconv.Itoa(list[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ", ")
}
