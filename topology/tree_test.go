package topology

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func TestPack(t *testing.T) {
	for name, c := range map[string]struct {
		sizes []int
		limit int
		want  []int
	}{
		"no group":                     {nil, 8, nil},
		"all in one run":               {[]int{4, 4}, 8, []int{2}},
		"as few runs as possible":      {[]int{4, 4, 2}, 8, []int{1, 3}},
		"none above the limit":         {[]int{3, 3, 3}, 8, []int{2, 3}},
		"as even as that allows":       {[]int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 8, []int{5, 10}},
		"one above the limit is alone": {[]int{2, 20, 2}, 8, []int{1, 2, 3}},
		"the order stays the same":     {[]int{6, 6, 2}, 8, []int{1, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			var groups []*group
			for _, size := range c.sizes {
				groups = append(groups, &group{gpus: make([]int, size)})
			}
			var ends []int
			end := 0
			for _, run := range pack(groups, c.limit) {
				end += len(run)
				ends = append(ends, end)
			}
			if diff := cmp.Diff(c.want, ends); diff != "" {
				t.Errorf("ends of the runs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTree(t *testing.T) {
	for name, c := range map[string]struct {
		s    *gpu.Snapshot
		want []pathGroup
	}{
		"no GPU":                        {&gpu.Snapshot{}, nil},
		"one GPU":                       {isolated(1), []pathGroup{{"unknown", []int{0}}}},
		"two GPUs without a known path": {isolated(2), []pathGroup{{"unknown", []int{0, 1}}}},
		"paths that do not follow a tree": {
			notATree(), []pathGroup{{"PIX", []int{0, 1, 2}}, {"unknown", []int{0, 1, 2}}},
		},
		"links of unknown GPUs": {
			&gpu.Snapshot{
				Devices: isolated(1).Devices,
				Links:   []gpu.Link{{A: 0, B: 5, PCIe: gpu.PathSingleSwitch}, {A: 0, B: 0, NVLinks: 3}},
			},
			[]pathGroup{{"unknown", []int{0}}},
		},
		"a lost GPU stays on its NUMA node": {
			withLost(machine(t, "pcie-quad"), 2, "lost"), []pathGroup{{"NODE", []int{0, 1}}, {"unknown", []int{2, 3}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []pathGroup
			for _, top := range numaGroups(c.s, linksOf(c.s)) {
				top.walk(func(g *group) {
					if len(g.children) > 0 {
						got = append(got, pathGroup{g.path.String(), g.gpus})
					}
				})
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("groups (-want +got):\n%s", diff)
			}
		})
	}
}

// pathGroup is a group without its children.
type pathGroup struct {
	Path string
	GPUs []int
}
