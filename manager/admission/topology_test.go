package admission

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/manager/model"
)

func TestPolicies(t *testing.T) {
	const rejected = ^Nodes(0)
	none := []Hint{}
	for name, test := range map[string]struct {
		machine                        Nodes
		resources                      [][]Hint
		bestEffort, restricted, single Nodes
	}{
		"nothing is requested":           {3, nil, 3, 3, 0},
		"any nodes will do":              {3, [][]Hint{nil, nil}, 3, 3, 0},
		"no nodes will do":               {3, [][]Hint{none}, 3, rejected, rejected},
		"one node":                       {3, [][]Hint{{preferred(1), possible(0, 1)}}, 2, 2, 2},
		"one of two equal nodes":         {3, [][]Hint{{preferred(1), preferred(0), possible(0, 1)}}, 1, 1, 1},
		"the only node of a machine":     {1, [][]Hint{{preferred(0)}}, 1, 1, 0},
		"two nodes where one cannot do":  {3, [][]Hint{{preferred(0, 1)}}, 3, 3, rejected},
		"two nodes where one could do":   {3, [][]Hint{{possible(0, 1)}}, 3, rejected, rejected},
		"one resource has no preference": {3, [][]Hint{nil, {preferred(1), possible(0, 1)}}, 2, 2, 2},
		"one resource has no nodes":      {3, [][]Hint{none, {preferred(1), possible(0, 1)}}, 2, rejected, rejected},
		"two resources on one node": {
			3, [][]Hint{{preferred(1), possible(0, 1)}, {preferred(0), preferred(1)}}, 2, 2, 2,
		},
		"two resources on different ones": {3, [][]Hint{{preferred(0)}, {preferred(1)}}, 3, rejected, rejected},
		"a common part, not preferred":    {7, [][]Hint{{preferred(0)}, {preferred(0, 1)}}, 1, rejected, rejected},
		"as many nodes as the most demanding resource needs": {
			15,
			[][]Hint{{possible(0, 1), possible(0, 1, 2, 3)}, {possible(0), possible(0, 1, 2), possible(0, 1, 2, 3)}},
			3, rejected, rejected,
		},
		"a device on node 0 beside two more resources": {
			3, [][]Hint{{preferred(0)}, {preferred(0), possible(0, 1)}, {preferred(0), possible(0, 1)}}, 1, 1, 1,
		},
		"the narrowest of the preferred ones": {7, [][]Hint{{preferred(0, 1), preferred(2)}}, 4, 4, 4},
		"only more nodes than each resource needs": {
			31, [][]Hint{{possible(0), possible(1, 2, 3)}, {possible(4), possible(1, 2, 3)}}, 14, rejected, rejected,
		},
		"nothing in common": {7, [][]Hint{{possible(0)}, {possible(1)}}, 7, rejected, rejected},
		"no NUMA nodes are known, and nothing asks for one": {0, [][]Hint{nil}, 0, 0, 0},
		"nodes with gaps": {
			NodesOf(3, 7),
			[][]Hint{{preferred(7)}, {preferred(7), possible(3, 7)}},
			NodesOf(7), NodesOf(7), NodesOf(7),
		},
	} {
		for policy, want := range map[Policy]Nodes{
			"": 0, PolicyNone: 0,
			PolicyBestEffort: test.bestEffort, PolicyRestricted: test.restricted, PolicySingleNUMANode: test.single,
		} {
			t.Run(name+", "+string(policy), func(t *testing.T) {
				got, err := Topology{Policy: policy, Machine: test.machine}.Merge(test.resources)
				switch {
				case want == rejected && !errors.Is(err, ErrTopologyAffinity):
					t.Errorf("affinity %b, error %v, want a rejection", got, err)
				case want != rejected && (got != want || err != nil):
					t.Errorf("affinity %b, error %v, want %b", got, err, want)
				}
			})
		}
	}
	if got := ErrTopologyAffinity.Error(); got != "Resources cannot be allocated with Topology locality" {
		t.Errorf("the rejection says %q", got)
	}
}

// TestMergeIsWhatAllCombinationsGive compares with a walk through all combinations, also of hints that Pool.Hints does
// not make.
func TestMergeIsWhatAllCombinationsGive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		machine := Nodes(rapid.SampledFrom([]int{1, 3, 15, 31, 0b1011010}).Draw(t, "machine"))
		hint := rapid.Custom(func(t *rapid.T) Hint {
			var h Hint
			for _, node := range rapid.SliceOfNDistinct(rapid.SampledFrom(machine.IDs()), 1, -1, rapid.ID).Draw(t, "nodes") {
				h.Nodes |= NodesOf(node)
			}
			h.Preferred = rapid.Bool().Draw(t, "preferred")
			return h
		})
		nodes := func(h Hint) Nodes { return h.Nodes }
		hints := rapid.OneOf(
			rapid.SliceOfNDistinct(hint, 1, 6, nodes), rapid.SliceOfNDistinct(hint, 1, 6, nodes),
			rapid.SampledFrom([][]Hint{nil, {}}),
		)
		topology := Topology{Machine: machine}
		topology.Policy = rapid.SampledFrom([]Policy{PolicyBestEffort, PolicyRestricted, PolicySingleNUMANode}).
			Draw(t, "p")
		resources := rapid.SliceOfN(hints, 0, 4).Draw(t, "resources")
		got, err := topology.Merge(resources)
		want, admitted := slowMerge(topology, resources)
		if (err == nil) != admitted || admitted && got != want {
			t.Fatalf("affinity %b, error %v, want %b, %t", got, err, want, admitted)
		}
	})
}

func slowMerge(t Topology, resources [][]Hint) (Nodes, bool) {
	combinations := []Hint{{Nodes: t.Machine, Preferred: true}} // with the first hint's nodes in first, or 0
	first, wanted := []Nodes{0}, 0
	for _, hints := range resources {
		if hints == nil {
			continue
		}
		if t.Policy == PolicySingleNUMANode {
			hints = slices.DeleteFunc(
				slices.Clone(hints),
				func(h Hint) bool { return !h.Preferred || h.Nodes.Count() > 1 },
			)
			if len(hints) == 0 {
				return 0, false
			}
		}
		if len(hints) == 0 {
			for i := range combinations {
				combinations[i].Preferred = false
			}
			continue
		}
		narrowest := 64
		var more []Hint
		var moreFirst []Nodes
		for i, c := range combinations {
			for _, h := range hints {
				narrowest = min(narrowest, h.Nodes.Count())
				same := first[i] == 0 || first[i] == h.Nodes
				more = append(more, Hint{Nodes: c.Nodes & h.Nodes, Preferred: c.Preferred && h.Preferred && same})
				if first[i] == 0 {
					moreFirst = append(moreFirst, h.Nodes)
				} else {
					moreFirst = append(moreFirst, first[i])
				}
			}
		}
		combinations, first, wanted = more, moreFirst, max(wanted, narrowest)
	}
	best := Hint{Nodes: t.Machine}
	better := func(a, b Hint) bool { // the first differing criterion decides
		for _, c := range []int{
			truth(b.Preferred) - truth(a.Preferred),
			truth(a.Nodes.Count() > wanted && !a.Preferred) - truth(b.Nodes.Count() > wanted && !b.Preferred),
			distance(a, wanted) - distance(b, wanted),
		} {
			if c != 0 {
				return c < 0
			}
		}
		return a.Nodes < b.Nodes
	}
	found := false
	for _, c := range combinations {
		if c.Nodes != 0 && (!found || better(c, best)) {
			best, found = c, true
		}
	}
	if t.Policy == PolicySingleNUMANode && best.Nodes == t.Machine {
		best.Nodes = 0
	}
	return best.Nodes, best.Preferred || t.Policy == PolicyBestEffort
}

func distance(h Hint, wanted int) int {
	if h.Preferred {
		return h.Nodes.Count()
	}
	return max(wanted-h.Nodes.Count(), h.Nodes.Count()-wanted)
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestValidate(t *testing.T) {
	for want, topology := range map[string]Topology{
		"":                          {Policy: PolicySingleNUMANode, Scope: ScopePod},
		`unknown policy: "strict"`:  {Policy: "strict"},
		`unknown scope: "sandboxy"`: {Policy: PolicyRestricted, Scope: "sandboxy"},
	} {
		got := ""
		if err := topology.Validate(); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%+v: error %q, want %q", topology, got, want)
		}
	}
}

func TestLimits(t *testing.T) {
	for name, test := range map[string]struct {
		pod  model.Pod
		want map[string]int
	}{
		"an empty pod":      {model.Pod{}, map[string]int{}},
		"an init container": {model.Pod{InitContainers: []model.Container{needs("i", 2)}}, map[string]int{resource: 2}},
		"the most of two inits": {
			model.Pod{InitContainers: []model.Container{needs("i", 2), needs("j", 4)}}, map[string]int{resource: 4},
		},
		"a container": {model.Pod{Containers: []model.Container{needs("c", 2)}}, map[string]int{resource: 2}},
		"containers that need more than each init container": {
			model.Pod{
				InitContainers: []model.Container{needs("i", 2)}, Containers: []model.Container{needs("c", 3), needs("d", 3)},
			}, map[string]int{resource: 6},
		},
		"two resources, one for the init container, one for the containers": {
			model.Pod{
				InitContainers: []model.Container{{Name: "i", Limits: map[string]int{"gpu": 3, "nic": 1}}},
				Containers: []model.Container{
					{Name: "c", Limits: map[string]int{"gpu": 1, "nic": 1}}, {Name: "d", Limits: map[string]int{"gpu": 1, "nic": 1}},
				},
			}, map[string]int{"gpu": 3, "nic": 2},
		},
		"a sidecar beside containers": {
			model.Pod{
				InitContainers: []model.Container{sidecar("s", 1)}, Containers: []model.Container{needs("c", 2)},
			}, map[string]int{resource: 3},
		},
		"an init container beside the sidecars before it": {
			model.Pod{
				InitContainers: []model.Container{sidecar("s", 2), needs("i", 3), sidecar("t", 1)},
				Containers:     []model.Container{needs("c", 1)},
			}, map[string]int{resource: 5},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, Limits(test.pod)); diff != "" {
				t.Errorf("limits (-want +got):\n%s", diff)
			}
		})
	}
}
