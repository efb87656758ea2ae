package topology

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// textLine is how far lines of words are apart, in pixels.
const textLine = 18

// most lines of a kind that the words below the drawing have; the rest is counted.
const mostNotes = 12

// picture puts the layers together, with a header.
func (l *layout) picture() Picture {
	p := Picture{
		Width: l.contentRight() + margin, Height: l.y + margin - textLine/2,
		Title: l.title(), Description: l.description(),
	}
	room := p.Width - 2*margin
	p.Shapes = append(p.Shapes, Rect{Class: "page", W: p.Width, H: p.Height})
	p.Shapes = append(p.Shapes, l.back...)
	p.Shapes = append(p.Shapes, l.middle...)
	p.Shapes = append(p.Shapes, l.front...)
	return Picture{p.Width, p.Height, p.Title, p.Description, append(
		p.Shapes,
		Text{Class: "title", X: margin, Y: margin + 14, Size: 18, Font: bold, String: fit(l.title(), room, 18, bold)},
		Text{Class: "faint", X: margin, Y: margin + 34, Size: 12, String: fit(l.subtitle(), room, 12, plain)},
	)}
}

func (l *layout) contentRight() int { return max(l.right, margin+minContent) }

// modelsOf counts the GPUs of each model, in the order in which they come.
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

func (l *layout) title() string {
	if models := modelsOf(l.s); len(models) > 0 {
		return strings.Join(models, ", ")
	}
	return plural(len(l.s.Devices), "GPU")
}

func (l *layout) subtitle() string {
	var parts []string
	if v := clean(l.s.DriverVersion); v != "" {
		parts = append(parts, "driver "+v)
	}
	if v := clean(l.s.CUDAVersion); v != "" {
		parts = append(parts, "CUDA "+v)
	}
	if n := len(l.unusable()); n > 0 {
		parts = append(parts, fmt.Sprintf("%d of %s unusable", n, plural(len(l.s.Devices), "GPU")))
	} else {
		parts = append(parts, plural(len(l.s.Devices), "GPU")+" usable")
	}
	if l.pods.known {
		parts = append(parts, plural(len(l.pods.list), "pod")+count(len(l.pods.list), " holds", " hold")+" devices")
	}
	return strings.Join(parts, " · ")
}

func plural(n int, what string) string { return fmt.Sprintf("%d %s", n, count(n, what, what+"s")) }

func (l *layout) unusable() []*gpu.Device {
	var bad []*gpu.Device
	for i := range l.s.Devices {
		if d := &l.s.Devices[i]; !d.Usable() {
			bad = append(bad, d)
		}
	}
	return bad
}

// description is the picture in words.
func (l *layout) description() string {
	parts := []string{l.subtitle() + "."}
	for _, g := range l.tree {
		parts = append(parts, l.numaName(g)+": "+l.names(g.gpus)+".")
	}
	for _, f := range l.fabrics {
		parts = append(parts, "NVSwitches join "+l.names(f.gpus)+", with "+f.width()+" each.")
	}
	if len(l.wires) > 0 {
		parts = append(parts, "NVLinks join "+plural(len(l.wires), "pair")+" of GPUs directly.")
	}
	for _, d := range l.unusable() {
		parts = append(parts, fmt.Sprintf("GPU %d is unusable: %s.", d.Index, clean(d.Error)))
	}
	for _, p := range l.pods.list {
		parts = append(parts, "Pod "+p.name+" holds "+p.all()+".")
	}
	return strings.Join(parts, "\n")
}

func (p pod) all() string {
	var words []string
	for _, c := range p.containers {
		words = append(words, c.devices)
	}
	return strings.Join(words, ", ")
}

// legend writes the words below the drawing: what is wrong, who holds what, and how to read it.
func (l *layout) legend() {
	l.y += 2 * barGap
	l.drawProblems()
	l.drawHolders()
	l.y += barGap
	for _, note := range l.notes() {
		for _, part := range wrap(note, l.contentRight()-margin, 12, 3) {
			l.write(part, "faint", margin)
			l.y += textLine
		}
	}
}

// write puts a line of words at y.
func (l *layout) write(s, class string, x int) {
	l.front = append(l.front, Text{Class: class, X: x, Y: l.y + 12, Size: 12, String: s})
}

func (l *layout) drawProblems() {
	bad := l.unusable()
	for i, d := range bad {
		if i == mostNotes && len(bad) > mostNotes+1 {
			l.write(fmt.Sprintf("and %d more are unusable", len(bad)-i), "bad", margin+18)
			l.y += textLine
			break
		}
		l.front = append(l.front, cross(margin+6, l.y+8, 4)...)
		words := fmt.Sprintf("GPU %d is unusable: %s", d.Index, clean(d.Error))
		for _, part := range wrap(words, l.contentRight()-margin-18, 12, 3) {
			l.write(part, "bad", margin+18)
			l.y += textLine
		}
	}
}

// drawHolders lists the pods with their signs, in columns.
func (l *layout) drawHolders() {
	type entry struct {
		pod   int
		words []string
	}
	columns := max((l.contentRight()-margin)/480, 1)
	room := (l.contentRight() - margin) / columns
	var entries []entry
	for i, p := range l.pods.list {
		words := []string{p.name}
		for _, c := range p.containers {
			words = append(words, c.container+": "+c.devices)
		}
		e := entry{pod: i}
		for j, w := range words {
			e.words = append(e.words, wrap(w, room-52-12*min(j, 1), 12, 4)...)
		}
		entries = append(entries, e)
	}
	if len(entries) > 0 {
		l.y += barGap
	}
	perColumn := (len(entries) + columns - 1) / columns
	top, bottom := l.y, l.y
	for i, e := range entries {
		if i%perColumn == 0 {
			l.y = top
		}
		x := margin + i/perColumn*room
		p := l.pods.list[e.pod]
		b, w := badge(p.sign, e.pod, x, l.y+1)
		thing := Group{Class: "holder", Title: p.name + " holds " + p.all(), Data: [][2]string{{"pod", p.name}}, Shapes: []Shape{b}}
		for j, words := range e.words {
			class := "plain"
			if j > 0 {
				class = "faint"
			}
			thing.Shapes = append(thing.Shapes, Text{Class: class, X: x + max(w, 16) + 8, Y: l.y + 12, Size: 12, String: words})
			l.y += textLine
		}
		l.y += 4
		l.front = append(l.front, thing)
		bottom = max(bottom, l.y)
	}
	l.y = bottom
}

// notes are what has to be said about the drawing, and how to read it.
func (l *layout) notes() []string {
	var notes []string
	if l.node.HoldersUnknown != "" {
		notes = append(notes, "Who holds which device is not known: "+clean(l.node.HoldersUnknown)+".")
	}
	if len(l.s.Devices) > 1 {
		notes = append(notes, "PCIe: two GPUs speak through the first bar below them that carries both.")
	}
	if len(l.fabrics) > 0 || len(l.wires) > 0 {
		notes = append(notes, "NVLink: the number on a line says how many links it stands for.")
	}
	if slices.ContainsFunc(l.s.Devices, func(d gpu.Device) bool { return len(d.MIG) > 0 }) {
		notes = append(notes, "MIG: a device is as high as its share of the GPU's memory.")
	}
	return append(notes, l.misfitNotes()...)
}

// misfitNotes name the pairs that are farther from each other than the drawing can show.
func (l *layout) misfitNotes() []string {
	pairs := misfits(l.tree, l.links)
	if len(pairs) == 0 {
		return nil
	}
	var words []string
	for _, p := range pairs[:min(len(pairs), mostNotes)] {
		words = append(words, strconv.Itoa(l.s.Devices[p[0]].Index)+"-"+strconv.Itoa(l.s.Devices[p[1]].Index)+" "+
			l.links.path(p[0], p[1]).String())
	}
	if len(pairs) > mostNotes {
		words = append(words, fmt.Sprintf("and %d more", len(pairs)-mostNotes))
	}
	return []string{"The PCIe paths that the driver names make no tree; these pairs are farther apart than drawn: " +
		strings.Join(words, ", ") + "."}
}
