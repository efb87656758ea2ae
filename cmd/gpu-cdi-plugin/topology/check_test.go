package topology

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

// element is an element of an SVG file.
type element struct {
	name, class, text string
	data              map[string]string // data attributes
	box               [4]int            // x0, y0, x1, y1 of a rect, path or text
}

// parse reads an SVG file strictly, and fails on elements and attributes that could load or run anything.
func parse(t testing.TB, svg []byte) []element {
	t.Helper()
	var elements []element
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return elements
		}
		if err != nil {
			t.Fatalf("not XML: %v", err)
		}
		switch token := token.(type) {
		case xml.CharData:
			if last := len(elements) - 1; last >= 0 && elements[last].name == "text" && elements[last].text == "" {
				elements[last].text = string(token)
				elements[last].box = textBox(elements[last])
			}
		case xml.StartElement:
			elements = append(elements, newElement(t, token))
		}
	}
}

func newElement(t testing.TB, token xml.StartElement) element {
	t.Helper()
	e := element{name: token.Name.Local, data: map[string]string{}}
	attributes := map[string]string{}
	for _, a := range token.Attr {
		attributes[a.Name.Local] = a.Value
		if key, ok := strings.CutPrefix(a.Name.Local, "data-"); ok {
			e.data[key] = a.Value
		}
		if strings.HasPrefix(a.Name.Local, "on") || strings.Contains(a.Name.Local, "href") {
			t.Errorf("attribute %s", a.Name.Local)
		}
	}
	e.class = attributes["class"]
	number := func(name string) int {
		n, err := strconv.Atoi(attributes[name])
		if err != nil && attributes[name] != "" {
			t.Error(err)
		}
		return n
	}
	switch e.name {
	case "title", "desc", "style", "g":
	case "svg", "rect":
		e.box = [4]int{number("x"), number("y"), number("x") + number("width"), number("y") + number("height")}
	case "text":
		e.data = attributes
	case "path":
		e.box = [4]int{1 << 30, 1 << 30, 0, 0}
		half := number("stroke-width") / 2
		points := strings.FieldsFunc(attributes["d"], func(r rune) bool { return strings.ContainsRune("MLQ ", r) })
		for i, s := range points {
			n, err := strconv.Atoi(s)
			if err != nil {
				t.Error(err)
			}
			e.box[i%2], e.box[i%2+2] = min(e.box[i%2], n-half), max(e.box[i%2+2], n+half)
		}
	default:
		t.Errorf("element %s", e.name)
	}
	return e
}

// textBox estimates where a text is, as the layout does.
func textBox(e element) [4]int {
	x, _ := strconv.Atoi(e.data["x"])
	y, _ := strconv.Atoi(e.data["y"])
	size, _ := strconv.Atoi(e.data["font-size"])
	f := plain
	for font, class := range fontClass {
		if strings.HasSuffix(e.class, class) {
			f = font
		}
	}
	w := textWidth(e.text, size, f)
	switch e.data["text-anchor"] {
	case "middle":
		x -= w / 2
	case "end":
		x -= w
	}
	return [4]int{x, y - size, x + w, y + size/3}
}

func checkBounds(t testing.TB, elements []element) {
	t.Helper()
	page := elements[0].box
	for _, e := range elements {
		b := e.box
		if b[0] < 0 || b[1] < 0 || b[2] > page[2] || b[3] > page[3] || b[2] < b[0] || b[3] < b[1] {
			t.Errorf("%s %s %q is at %v, outside %v", e.name, e.class, e.text, b, page)
		}
	}
}

// checkOverlaps fails if a card or bar covers another, or a NUMA node's frame another's.
func checkOverlaps(t testing.TB, elements []element) {
	t.Helper()
	var solid, frames []element
	for _, e := range elements {
		switch kind, _, _ := strings.Cut(e.class, " "); {
		case e.name != "rect":
		case kind == "card" || kind == "bar" || kind == "fabric":
			solid = append(solid, e)
		case kind == "frame":
			frames = append(frames, e)
		}
	}
	for _, list := range [][]element{solid, frames} {
		for i, e := range list {
			for _, f := range list[i+1:] {
				if e.box[0] < f.box[2] && f.box[0] < e.box[2] && e.box[1] < f.box[3] && f.box[1] < e.box[3] {
					t.Errorf("%s at %v and %s at %v overlap", e.class, e.box, f.class, f.box)
				}
			}
		}
	}
}

func checkGPUs(t testing.TB, s *gpu.Snapshot, elements []element) {
	t.Helper()
	got := map[string]string{}
	migs := 0
	for _, e := range elements {
		if e.class == "gpu" {
			got[e.data["gpu"]] += e.data["state"]
		}
		if e.class == "mig" {
			migs++
		}
	}
	want, wantMIG := map[string]string{}, 0
	for i := range s.Devices {
		d := &s.Devices[i]
		want[strconv.Itoa(d.Index)] = map[bool]string{true: "ok", false: "unusable"}[d.Usable()]
		if d.MIGEnabled {
			wantMIG += len(d.MIG)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" || migs != wantMIG {
		t.Errorf("GPUs (-want +got), and %d MIG devices, want %d:\n%s", migs, wantMIG, diff)
	}
}

// checkPaths checks that the first bar that spans two GPUs is that of their path. Pairs that fit into no tree are left
// out.
func checkPaths(t testing.TB, s *gpu.Snapshot, elements []element) {
	t.Helper()
	apart := map[[2]int]bool{}
	scene := newScene(Node{Snapshot: s})
	for _, p := range notInTree(scene.root, scene.links) {
		apart[[2]int{s.Devices[p[0]].Index, s.Devices[p[1]].Index}] = true
	}
	type bar struct {
		path string
		gpus map[string]bool
	}
	var bars []bar
	for _, e := range elements {
		if e.class == "bar" && e.name == "g" {
			b := bar{e.data["path"], map[string]bool{}}
			for g := range strings.FieldsSeq(e.data["gpus"]) {
				b.gpus[g] = true
			}
			bars = append(bars, b)
		}
	}
	slices.SortStableFunc(bars, func(a, b bar) int { return len(a.gpus) - len(b.gpus) })
	for _, link := range s.Links {
		if link.PCIe == gpu.PathUnknown || apart[[2]int{link.A, link.B}] {
			continue
		}
		a, b := strconv.Itoa(link.A), strconv.Itoa(link.B)
		i := slices.IndexFunc(bars, func(bar bar) bool { return bar.gpus[a] && bar.gpus[b] })
		if i < 0 || bars[i].path != link.PCIe.String() {
			t.Errorf("GPU %s and %s: the first common bar is not that of %s", a, b, link.PCIe)
		}
	}
}

func checkNVLinks(t testing.TB, s *gpu.Snapshot, elements []element) {
	t.Helper()
	drawn := map[string]int{}
	var switched [][]string
	for _, e := range elements {
		switch e.class {
		case "nvlink":
			n, err := strconv.Atoi(e.data["nvlinks"])
			if err != nil {
				t.Error(err)
			}
			drawn[e.data["gpus"]+" "+e.data["switched"]] = n
		case "nvswitch":
			switched = append(switched, strings.Fields(e.data["gpus"]))
		}
	}
	direct := 0
	for _, l := range s.Links {
		switch {
		case l.NVLinks <= 0:
		case l.Switched:
			checkSwitched(t, l, drawn, switched)
		default:
			direct++
			if n := drawn[fmt.Sprintf("%d %d false", l.A, l.B)]; n != l.NVLinks {
				t.Errorf("GPU %d and %d: %d NVLinks are drawn, want %d", l.A, l.B, n, l.NVLinks)
			}
		}
	}
	for key := range drawn {
		if strings.HasSuffix(key, "false") {
			direct--
		}
	}
	if direct != 0 {
		t.Errorf("%d direct NVLinks are not drawn", direct)
	}
}

func checkSwitched(t testing.TB, l gpu.Link, drawn map[string]int, switched [][]string) {
	t.Helper()
	for _, i := range []int{l.A, l.B} {
		if n := drawn[fmt.Sprintf("%d true", i)]; n < l.NVLinks {
			t.Errorf("GPU %d: %d NVLinks to the switches are drawn, want %d", i, n, l.NVLinks)
		}
	}
	for _, gpus := range switched {
		if slices.Contains(gpus, strconv.Itoa(l.A)) && slices.Contains(gpus, strconv.Itoa(l.B)) {
			return
		}
	}
	t.Errorf("GPU %d and %d have no common bar of NVSwitches", l.A, l.B)
}
