package topology

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

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
			for _, numa := range treeOf(c.s, linksOf(c.s)).children {
				got = append(got, pathGroups(numa)...)
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

// pathGroups returns a group and all groups in it, the inner ones first, without single GPUs.
func pathGroups(g *group) []pathGroup {
	var list []pathGroup
	for _, c := range g.children {
		list = append(list, pathGroups(c)...)
	}
	if len(g.children) > 0 {
		list = append(list, pathGroup{g.path.String(), g.gpus})
	}
	return list
}
