package nvml

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

// createNVLinks returns an NVLink to each of the addresses; "switch" is an NVSwitch.
func createNVLinks(remotes ...string) []nvlink {
	var links []nvlink
	for _, r := range remotes {
		links = append(links, nvlink{remote: r, toSwitch: strings.HasPrefix(r, "switch")})
	}
	return links
}

func TestCountNVLinks(t *testing.T) {
	for name, c := range map[string]struct {
		a, b     []nvlink
		count    int
		switched bool
	}{
		"no NVLink at all":              {nil, nil, 0, false},
		"two direct links":              {createNVLinks("B", "B", "C"), createNVLinks("A", "A"), 2, false},
		"a link active at one end only": {createNVLinks("B", "B"), createNVLinks("A"), 1, false},
		"links to other GPUs":           {createNVLinks("C", "C"), createNVLinks("C", "C"), 0, false},
		"all links to switches": {
			createNVLinks("switch1", "switch2", "switch2"), createNVLinks("switch1", "switch1", "switch3"), 3, true,
		},
		"fewer at one end":           {createNVLinks("switch1", "switch2"), createNVLinks("switch1"), 1, true},
		"switched at one end only":   {createNVLinks("switch1", "switch2"), createNVLinks("C"), 0, false},
		"direct links first":         {createNVLinks("B", "switch1"), createNVLinks("A", "switch1"), 1, false},
		"remote ends unknown":        {createNVLinks("", ""), createNVLinks("", ""), 0, false},
		"switches without addresses": {[]nvlink{{toSwitch: true}}, []nvlink{{toSwitch: true}}, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			if n, switched := countNVLinks("A", c.a, "B", c.b); n != c.count || switched != c.switched {
				t.Errorf("A to B: %d links, switched %v, want %d, %v", n, switched, c.count, c.switched)
			}
			if n, switched := countNVLinks("B", c.b, "A", c.a); n != c.count || switched != c.switched {
				t.Errorf("B to A: %d links, switched %v, want %d, %v", n, switched, c.count, c.switched)
			}
		})
	}
}

func TestCombineLinksOmitsUnreadableGPUs(t *testing.T) {
	devices := []gpu.Device{{PCIBusID: "A"}, {PCIBusID: "B", Error: "lost"}, {PCIBusID: "C"}, {PCIBusID: "D"}}
	nvlinks := [][]nvlink{createNVLinks("C"), nil, createNVLinks("A"), nil}
	answers := map[pair]pathReading{
		{0, 2}: {path: gpu.PathNode}, {0, 3}: {path: gpu.PathSystem}, {2, 3}: {err: errors.New("no GPU is the cause")},
	}
	for i := range devices {
		devices[i].NUMANode = gpu.NoNUMANode
	}
	want := []gpu.Link{
		{A: 0, B: 2, PCIe: gpu.PathNode, NVLinks: 1}, {A: 0, B: 3, PCIe: gpu.PathSystem}, {A: 2, B: 3},
	}
	if diff := cmp.Diff(want, combineLinks(devices, nvlinks, answers, createHost(t, nil))); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
}

func TestFailingGPUs(t *testing.T) {
	bad := pathReading{err: errors.New("bad")}
	for name, c := range map[string]struct {
		failing []pair
		gpus    int
		want    []int
	}{
		"all pairs answered":                         {nil, 4, nil},
		"all pairs of one GPU fail":                  {[]pair{{0, 2}, {1, 2}, {2, 3}}, 4, []int{2}},
		"all pairs of two GPUs fail":                 {[]pair{{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}}, 4, []int{0, 1}},
		"one pair fails of several":                  {[]pair{{0, 1}}, 4, nil},
		"two GPUs, of which either may be the cause": {[]pair{{0, 1}}, 2, nil},
		"every pair fails, so no GPU is the cause":   {[]pair{{0, 1}, {0, 2}, {1, 2}}, 3, nil},
		"one GPU has no pairs":                       {nil, 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			answers := map[pair]pathReading{}
			for a := range c.gpus {
				for b := a + 1; b < c.gpus; b++ {
					answers[pair{a, b}] = pathReading{}
				}
			}
			for _, p := range c.failing {
				answers[p] = bad
			}
			var got []int
			for i, err := range failingGPUs(answers) {
				if !errors.Is(err, bad.err) {
					t.Errorf("GPU %d has the error %v", i, err)
				}
				got = append(got, i)
			}
			slices.Sort(got)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("failing GPUs (-want +got):\n%s", diff)
			}
		})
	}
}
