package topology

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func checkBounds(t testing.TB, p Picture, shapes []Shape) {
	t.Helper()
	inside := func(what string, x0, y0, x1, y1 int) {
		if x0 < 0 || y0 < 0 || x1 > p.Width || y1 > p.Height || x1 < x0 || y1 < y0 {
			t.Errorf("%s is from %d,%d to %d,%d, outside %dx%d", what, x0, y0, x1, y1, p.Width, p.Height)
		}
	}
	for _, s := range shapes {
		switch s := s.(type) {
		case Group:
			checkBounds(t, p, s.Shapes)
		case Rect:
			inside(s.Class, s.X, s.Y, s.X+s.W, s.Y+s.H)
		case Path:
			for _, at := range s.Points {
				inside(s.Class, at[0]-s.Stroke/2, at[1]-s.Stroke/2, at[0]+s.Stroke/2, at[1]+s.Stroke/2)
			}
		case Text:
			x0, y0, x1, y1 := s.bounds()
			inside(strconv.Quote(s.String), x0, y0, x1, y1)
		}
	}
}

// No card and no bar covers another one, and no NUMA node's frame another's.
func checkCards(t testing.TB, p Picture) {
	t.Helper()
	var solid, frames []Rect
	for _, s := range p.Shapes {
		g, ok := s.(Group)
		if !ok {
			continue
		}
		for _, s := range g.Shapes {
			if r, ok := s.(Rect); ok && (strings.HasPrefix(r.Class, "card") || strings.HasPrefix(r.Class, "bar") || r.Class == "fabric") {
				solid = append(solid, r)
			} else if ok && r.Class == "frame" {
				frames = append(frames, r)
			}
		}
	}
	checkApart(t, solid)
	checkApart(t, frames)
}

func checkApart(t testing.TB, list []Rect) {
	t.Helper()
	for i, r := range list {
		for _, s := range list[i+1:] {
			if r.X < s.X+s.W && s.X < r.X+r.W && r.Y < s.Y+s.H && s.Y < r.Y+r.H {
				t.Errorf("%+v and %+v overlap", r, s)
			}
		}
	}
}

// thing is an element of the SVG with data attributes.
type thing struct {
	class string
	data  map[string]string
}

// parse reads an SVG strictly, refuses what may be in none, and returns its elements.
func parse(t testing.TB, svg []byte) []thing {
	t.Helper()
	var things []thing
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return things
		}
		if err != nil {
			t.Fatalf("no XML: %v", err)
		}
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		switch e.Name.Local {
		case "svg", "title", "desc", "style", "g", "rect", "path", "text":
		default:
			t.Errorf("element %s", e.Name.Local)
		}
		th := thing{data: map[string]string{}}
		for _, a := range e.Attr {
			if a.Name.Local == "class" {
				th.class = a.Value
			}
			if key, ok := strings.CutPrefix(a.Name.Local, "data-"); ok {
				th.data[key] = a.Value
			}
			if strings.HasPrefix(a.Name.Local, "on") || strings.Contains(a.Name.Local, "href") {
				t.Errorf("attribute %s", a.Name.Local)
			}
		}
		things = append(things, th)
	}
}

func checkGPUs(t testing.TB, s *gpu.Snapshot, things []thing) {
	t.Helper()
	got := map[string]string{}
	migs := 0
	for _, th := range things {
		if th.class == "gpu" {
			got[th.data["gpu"]] += th.data["state"]
		}
		if th.class == "mig" {
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

// The first bar that carries both of two GPUs is of the path between them, or of a nearer one if the driver's paths are
// no tree; then the picture says so.
func checkPaths(t testing.TB, s *gpu.Snapshot, things []thing) {
	t.Helper()
	apart := map[[2]int]bool{}
	l := newLayout(Node{Snapshot: s})
	for _, p := range misfits(l.tree, l.links) {
		apart[[2]int{s.Devices[p[0]].Index, s.Devices[p[1]].Index}] = true
	}
	for _, link := range s.Links {
		if link.PCIe == gpu.PathUnknown || apart[[2]int{link.A, link.B}] {
			continue
		}
		if got := nearestBar(things, link.A, link.B); got != link.PCIe.String() {
			t.Errorf("GPU %d and %d: %s, and the bar is %q", link.A, link.B, link.PCIe, got)
		}
	}
}

func nearestBar(things []thing, a, b int) string {
	path, size := "none", 1<<30
	for _, th := range things {
		gpus := strings.Fields(th.data["gpus"])
		if th.class == "bar" && has(gpus, a) && has(gpus, b) && len(gpus) < size {
			path, size = th.data["path"], len(gpus)
		}
	}
	return path
}

func has(list []string, n int) bool {
	for _, s := range list {
		if s == strconv.Itoa(n) {
			return true
		}
	}
	return false
}

func checkNVLinks(t testing.TB, s *gpu.Snapshot, things []thing) {
	t.Helper()
	drawn := map[string]int{}
	var switched [][]string
	for _, th := range things {
		switch th.class {
		case "nvlink":
			n, err := strconv.Atoi(th.data["nvlinks"])
			if err != nil {
				t.Error(err)
			}
			drawn[th.data["gpus"]+" "+th.data["switched"]] = n
		case "nvswitch":
			switched = append(switched, strings.Fields(th.data["gpus"]))
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
				t.Errorf("GPU %d and %d have %d NVLinks, drawn are %d", l.A, l.B, l.NVLinks, n)
			}
		}
	}
	for key := range drawn {
		if strings.HasSuffix(key, "false") {
			direct--
		}
	}
	if direct != 0 {
		t.Errorf("%d direct NVLinks more than drawn", direct)
	}
}

func checkSwitched(t testing.TB, l gpu.Link, drawn map[string]int, switched [][]string) {
	t.Helper()
	for _, i := range []int{l.A, l.B} {
		if n := drawn[fmt.Sprintf("%d true", i)]; n < l.NVLinks {
			t.Errorf("GPU %d has %d NVLinks to the switches, drawn are %d", i, l.NVLinks, n)
		}
	}
	for _, gpus := range switched {
		if has(gpus, l.A) && has(gpus, l.B) {
			return
		}
	}
	t.Errorf("GPU %d and %d are on no bar of NVSwitches together", l.A, l.B)
}
