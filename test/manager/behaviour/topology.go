package behaviour

import (
	"context"
	"errors"
	"slices"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

var preferred = []Case{
	{
		Name:    "a plugin is asked what it prefers among the free devices, with those it must include",
		Mirrors: "TestGetPreferredAllocationParameters",
		Run: func(n *Node) {
			var asked []*v1beta1.ContainerPreferredAllocationRequest
			p := n.preferring(numbered(6), func(r *available) []string {
				asked = append(asked, r)
				return nil
			})
			n.admit(single("a", 2))
			n.equal("size", 2, int(asked[0].AllocationSize))
			n.equal("available", 6, len(asked[0].AvailableDeviceIDs))
			n.equal("to include", 0, len(asked[0].MustIncludeDeviceIDs))
			both := withInit(pod("b", container("main", limits{gpu: 3})), container("init", limits{gpu: 1}))
			n.admit(both)
			n.equal("calls", 3, p.Calls().Preferred)
			n.equal("size", 3, int(asked[2].AllocationSize))
			n.equal("available", 4, len(asked[2].AvailableDeviceIDs))
			n.equal("to include", n.has(both, "init"), asked[2].MustIncludeDeviceIDs)
			n.subset("init", n.has(both, "init"), "main", n.has(both, "main"))
		},
	},
	{
		Name:    "the preferred devices are allocated",
		Mirrors: "TestGetPreferredAllocation of endpoint_test.go",
		Run: func(n *Node) {
			n.preferring(numbered(8), func(*available) []string { return []string{"d003", "d006"} })
			n.admit(single("a", 2))
			n.equal("devices", []string{"d003", "d006"}, n.has(single("a", 2), "main"))
		},
	},
	{
		Name:    "unknown, used and repeated devices and short answers of a preference are ignored",
		Mirrors: "facts 1c: Preferred result",
		Run: func(n *Node) {
			answer := []string{"d005"}
			n.preferring(numbered(8), func(*available) []string { return answer })
			n.admit(single("a", 1))
			answer = []string{"no-such-device", "d005", "d002", "d002", ""}
			n.admit(single("b", 3))
			got := n.has(single("b", 3), "main")
			n.equal("number of devices", 3, len(got))
			n.disjoint(got, []string{"d005"})
			n.subset("d002", []string{"d002"}, "b", got)
		},
	},
	{
		Name:    "an error of the preference refuses the pod",
		Mirrors: "facts 1c: Preferred result",
		Run: func(n *Node) {
			p := n.preferring(numbered(2), nil)
			p.Behave(does{Preferred: undecided})
			n.refuse(single("a", 1), "device plugin GetPreferredAllocation rpc failed with err:")
			p.Behave(does{})
			n.admit(single("b", 2))
		},
	},
	{
		Name:    "an error of GetPreferredAllocation after some devices were picked",
		Mirrors: "B2",
		Kubelet: "makes these devices unavailable until another pod is released",
		Here:    "gives them back",
		Config:  Config{Policy: "best-effort"},
		Run: func(n *Node) {
			list := []*v1beta1.Device{device("a", 0), device("b", 1), device("c", 1), device("x"), device("y")}
			p := n.preferring(list, nil)
			p.Behave(does{Preferred: undecided})
			n.refuse(single("a", 4), "undecided")
			p.Behave(does{})
			if n.faulty() {
				n.refuse(single("b", 3), "Available: 2")
				return
			}
			n.admit(single("b", 5))
		},
	},
	{
		Name:    "a plugin whose devices of init containers suffice",
		Mirrors: "B12",
		Kubelet: "gets no GetPreferredAllocation call",
		Here:    "gets a GetPreferredAllocation call for them",
		Run: func(n *Node) {
			p := n.preferring(numbered(4), nil)
			n.admit(withInit(pod("a", container("main", limits{gpu: 1})), container("init", limits{gpu: 2})))
			want := 2
			if n.faulty() {
				want = 1
			}
			n.equal("calls", want, p.Calls().Preferred)
		},
	},
}

func undecided(context.Context, *available) ([]string, error) { return nil, errors.New("undecided") }

// preferring adds a plugin that offers GetPreferredAllocation.
func (n *Node) preferring(list []*v1beta1.Device, prefer func(*available) []string) *Plugin {
	n.Helper()
	p := n.prepare(gpu, list...)
	b := does{Options: withPreference}
	if prefer != nil {
		b.Preferred = func(_ context.Context, r *available) ([]string, error) { return prefer(r), nil }
	}
	p.Behave(b)
	n.add(p)
	n.awaitCounts(gpu, Counts{Capacity: len(list), Allocatable: len(list)})
	return p
}

const (
	locality = "TopologyAffinityError: Resources cannot be allocated with Topology locality"
	one      = "single-numa-node"
)

var topology = []Case{
	{
		Name:    "a preference is asked for among the aligned devices only, and others in the answer are ignored",
		Mirrors: "TestTopologyAlignedAllocation",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			list := []*v1beta1.Device{
				device("a", 0), device("b", 0), device("c", 0), device("d", 1), device("e", 1), device("f", 1),
			}
			var answer, asked []string
			p := n.preferring(list, func(r *available) []string {
				asked = slices.Sorted(slices.Values(r.AvailableDeviceIDs))
				return answer
			})
			answer = []string{"b", "c"}
			n.admit(single("aligned", 2))
			n.equal("devices", answer, n.has(single("aligned", 2), "main"))
			n.equal("asked for", []string{"a", "b", "c"}, asked)
			n.release(single("aligned", 2))

			answer = []string{"e", "bogus", "c"}
			n.admit(single("other", 2))
			got := n.has(single("other", 2), "main")
			n.subset("c", []string{"c"}, "other", got)
			n.subset("other", got, "node 0", []string{"a", "b", "c"})
			n.release(single("other", 2))

			n.admit(single("all", 3))
			n.equal("devices", []string{"a", "b", "c"}, n.has(single("all", 3), "main"))
			n.equal("calls", 2, p.Calls().Preferred)
		},
	},
	{
		Name:    "a preference is asked for among all devices if the aligned ones do not suffice",
		Mirrors: "TestTopologyAlignedAllocation",
		Config:  Config{Policy: "best-effort"},
		Run: func(n *Node) {
			list := []*v1beta1.Device{device("a", 0), device("b", 1), device("c", 1), device("x")}
			n.preferring(list, func(*available) []string { return []string{"x"} })
			n.admit(single("a", 4))
			n.equal("devices", []string{"a", "b", "c", "x"}, n.has(single("a", 4), "main"))
		},
	},
	{
		Name:    "with a Topology Manager, a pod that is admitted again keeps its devices",
		Mirrors: "TestGetTopologyHints: already allocated",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, device("a", 0), device("b", 0), device("c", 1), device("d", 1))
			n.admit(single("a", 2))
			before := n.has(single("a", 2), "main")
			n.admit(single("b", 2))
			n.admit(single("a", 2))
			n.equal("devices", before, n.has(single("a", 2), "main"))
		},
	},
	{
		Name:    "with a Topology Manager, a pod that is admitted again with another limit",
		Mirrors: "TestGetTopologyHints: already allocated less, more",
		Kubelet: "is refused with the text for a topology that does not fit",
		Here:    "is refused with the text for a changed request",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, device("a", 0), device("b", 0), device("c", 0))
			n.admit(single("a", 2))
			text := "changed request for resource"
			if n.faulty() {
				text = locality
			}
			n.refuse(single("a", 1), text)
			n.refuse(single("a", 3), text)
		},
	},
}
