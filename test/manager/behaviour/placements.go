package behaviour

import (
	"slices"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
)

// The devices of most nodes here, with their NUMA nodes.
var (
	plain = []*v1beta1.Device{device("a", 0), device("b", 1), device("c", 1)}
	pairs = []*v1beta1.Device{device("a", 0), device("b", 0), device("c", 1), device("d", 1)}
	split = []*v1beta1.Device{device("a", 0), unhealthy("b", 0), device("c", 1), unhealthy("d", 1)}
)

// placements are cases with one pod: which devices its containers get with a policy.
var placements = []Case{
	{
		Name:    "a resource without topology is aligned nowhere",
		Mirrors: "TestGetTopologyHints",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, device("a"), device("b"))
			n.places(single("p", 2), map[string][]string{"main": {"a", "b"}})
		},
	},
	{
		Name:    "a pod without devices is admitted with any policy",
		Mirrors: "TestGetTopologyHints",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, plain...)
			n.places(pod("p", container("main", nil)), map[string][]string{"main": nil})
		},
	},
	{
		Name:    "one device is taken from the first NUMA node",
		Mirrors: "TestGetTopologyHints",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, plain...)
			n.places(single("p", 1), map[string][]string{"main": {"a"}})
		},
	},
	{
		Name:    "two devices are taken from the NUMA node that has two",
		Mirrors: "TestGetTopologyHints",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, plain...)
			n.places(single("p", 2), map[string][]string{"main": {"b", "c"}})
		},
	},
	{
		Name:    "a device that is close to two NUMA nodes is aligned with both",
		Mirrors: "TestFilterByAffinity",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, device("a", 0), device("m", 0, 1))
			n.places(single("p", 2), map[string][]string{"main": {"a", "m"}})
		},
	},
	{
		Name:    "devices of two NUMA nodes are refused by single-numa-node",
		Mirrors: "TestTopologyAlignedAllocation",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			p := n.plug(gpu, plain...)
			n.refuse(single("p", 3), locality)
			n.equal("calls of Allocate", 0, p.Calls().Allocate)
		},
	},
	{
		Name:    "devices of two NUMA nodes are admitted by restricted if no node has enough",
		Mirrors: "TestTopologyAlignedAllocation",
		Config:  Config{Policy: "restricted"},
		Run: func(n *Node) {
			n.plug(gpu, plain...)
			n.places(single("p", 3), map[string][]string{"main": {"a", "b", "c"}})
		},
	},
	{
		Name:    "devices of two NUMA nodes are refused by restricted if a node could have enough",
		Mirrors: "TestTopologyAlignedAllocation",
		Config:  Config{Policy: "restricted"},
		Run: func(n *Node) {
			p := n.plug(gpu, split...)
			n.refuse(single("p", 2), locality)
			n.equal("calls of Allocate", 0, p.Calls().Allocate)
		},
	},
	{
		Name:    "devices of two NUMA nodes are admitted by best-effort",
		Mirrors: "TestTopologyAlignedAllocation",
		Config:  Config{Policy: "best-effort"},
		Run: func(n *Node) {
			n.plug(gpu, split...)
			n.places(single("p", 2), map[string][]string{"main": {"a", "c"}})
		},
	},
	{
		Name:    "more devices than there are have no NUMA node",
		Mirrors: "TestGetTopologyHints: more than available",
		Config:  Config{Policy: "restricted"},
		Run: func(n *Node) {
			p := n.plug(gpu, plain...)
			n.refuse(single("p", 4), locality)
			n.equal("calls of Allocate", 0, p.Calls().Allocate)
		},
	},
	{
		Name:    "more devices than there are lack with best-effort too",
		Mirrors: "TestGetTopologyHints: more than available",
		Config:  Config{Policy: "best-effort"},
		Run: func(n *Node) {
			p := n.plug(gpu, plain...)
			n.refuse(single("p", 4), "Requested: 4, Available: 3")
			n.equal("calls of Allocate", 0, p.Calls().Allocate)
		},
	},
	{
		Name:    "two resources are taken from one NUMA node",
		Mirrors: "TestGetTopologyHints: 2 types",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, plain...)
			n.plug(nic, device("n1", 1))
			p := pod("p", container("main", limits{gpu: 1, nic: 1}))
			n.admit(p)
			n.equal("NICs", []string{"n1"}, n.Devices(p, "main")[nic])
			n.subset("main", n.has(p, "main"), "node 1", []string{"b", "c"})
		},
	},
	{
		Name:    "containers are aligned one by one",
		Mirrors: "TestGetPodTopologyHints",
		Config:  Config{Policy: one},
		Run: func(n *Node) {
			n.plug(gpu, pairs...)
			n.places(
				pod("p", container("main", limits{gpu: 2}), container("other", limits{gpu: 2})),
				map[string][]string{"main": {"a", "b"}, "other": {"c", "d"}},
			)
		},
	},
	{
		Name:    "with the scope pod the devices of all containers are on one NUMA node",
		Mirrors: "TestGetPodTopologyHints",
		Config:  Config{Policy: one, Scope: "pod"},
		Run: func(n *Node) {
			p := n.plug(gpu, pairs...)
			n.refuse(pod("p", container("main", limits{gpu: 2}), container("other", limits{gpu: 2})), locality)
			n.equal("calls of Allocate", 0, p.Calls().Allocate)
		},
	},
	{
		Name:    "with the scope pod, init containers and containers count by the larger",
		Mirrors: "TestGetPodDeviceRequest",
		Config:  Config{Policy: one, Scope: "pod"},
		Run: func(n *Node) {
			n.plug(gpu, pairs...)
			p := pod("p", container("main", limits{gpu: 1}), container("other", limits{gpu: 1}))
			p = withInit(p, container("i1", limits{gpu: 2}), container("i2", limits{gpu: 1}))
			n.places(p, map[string][]string{"i1": {"a", "b"}})
		},
	},
	{
		Name:    "with the scope pod, a sidecar counts with the containers",
		Mirrors: "TestGetPodDeviceRequest",
		Config:  Config{Policy: one, Scope: "pod"},
		Run: func(n *Node) {
			p := n.plug(gpu, pairs...)
			n.refuse(withInit(pod("p", container("main", limits{gpu: 2})), sidecar("side", limits{gpu: 1})), locality)
			n.equal("calls of Allocate", 0, p.Calls().Allocate)
		},
	},
	{
		Name:    "with the scope pod, a sidecar and a container share a NUMA node",
		Mirrors: "TestGetPodDeviceRequest",
		Config:  Config{Policy: one, Scope: "pod"},
		Run: func(n *Node) {
			n.plug(gpu, plain...)
			p := withInit(single("p", 1), sidecar("side", limits{gpu: 1}))
			n.admit(p)
			both := slices.Concat(n.has(p, "side"), n.has(p, "main"))
			n.equal("devices", []string{"b", "c"}, slices.Sorted(slices.Values(both)))
		},
	},
}

// places admits a pod and compares the GPUs that its containers get.
func (n *Node) places(p model.Pod, want map[string][]string) {
	n.Helper()
	n.admit(p)
	for name, ids := range want {
		n.equal("devices of "+name, ids, n.has(p, name))
	}
}
