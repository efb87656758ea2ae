package behaviour

import (
	"os"
	"strings"

	"gpu-cdi-plugin/test/lib/testenv"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const noHealthy = "no healthy devices present; cannot allocate unhealthy devices " + gpu

var restarts = []Case{
	{
		Name:    "a pod keeps its devices and options over restarts of its container, the plugin and the manager",
		Mirrors: "e2e device_plugin_test.go: assignment kept; TestCheckpoint",
		Run: func(n *Node) {
			list := []*v1beta1.Device{device("a", 0), device("b", 0, 1), device("c"), device("d", 1)}
			p := n.plug(gpu, list...)
			mine := single("a", 3)
			n.admit(mine)
			devices, options, listed := n.has(mine, "main"), n.start(mine, "main"), n.listPods()
			check := func(after string) {
				n.Helper()
				n.admit(mine)
				n.equal("devices after "+after, devices, n.has(mine, "main"))
				n.equal("options after "+after, options, n.start(mine, "main"))
				n.equal("PodResources after "+after, listed, n.listPods())
			}
			check("a restart of the container")
			p.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 4, Allocatable: 0})
			n.again(p, 4)
			check("a restart of the plugin")
			n.restart(Boot{})
			n.awaitCounts(gpu, Counts{Capacity: 0, Allocatable: 0})
			n.equal("devices before the plugin is back", devices, n.has(mine, "main"))
			n.again(p, 4)
			check("a restart of the manager")
			p.Stop()
			n.restart(Boot{})
			n.again(p, 4)
			check("a restart of both")
			n.admit(single("b", 1))
			n.disjoint(devices, n.has(single("b", 1), "main"))
			n.refuse(single("c", 1), "Available: 0")
		},
	},
	{
		Name:    "after a restart a resource has no devices until its plugin is back, and pods are refused",
		Mirrors: "TestUpdateCapacityAllocatable: checkpoint reload; e2e device_manager_test.go",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			n.admit(single("old", 1))
			n.restart(Boot{})
			n.awaitCounts(gpu, Counts{Capacity: 0, Allocatable: 0})
			n.refuse(single("new", 1), "UnexpectedAdmissionError: Allocate failed due to "+noHealthy)
			n.again(p, 2)
			n.admit(single("new", 1))
		},
	},
	{
		Name:    "a pod that was deleted while the manager was down frees its devices",
		Mirrors: "e2e device_plugin_test.go: [OrphanedPods]",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			n.admit(single("a", 2))
			n.restart(Boot{})
			n.release(single("a", 2))
			n.again(p, 2)
			n.admit(single("b", 2))
		},
	},
	{
		Name:    "a running pod is admitted again after a restart, before its plugin is back",
		Mirrors: "facts 1c: Kubelet restart skip; e2e: kubelet restart",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			n.admit(single("a", 1))
			before := n.has(single("a", 1), "main")
			n.restart(Boot{NotReady: true, Running: []Container{{"uid-a", "main"}}})
			n.admit(single("a", 1))
			n.equal("devices", before, n.has(single("a", 1), "main"))
		},
	},
	{
		Name:    "a pod after a reboot of the node, before its plugin is back",
		Mirrors: "e2e device_plugin_test.go: node reboot; device_manager_test.go",
		Kubelet: "is refused, which is final",
		Here:    "keeps its devices",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			n.admit(single("a", 1))
			p.Stop()
			n.restart(Boot{NotReady: true})
			if n.faulty() {
				n.refuse(single("a", 1), "Allocate failed due to "+noHealthy)
				return
			}
			n.admit(single("a", 1))
			n.equal("number of devices", 1, len(n.has(single("a", 1), "main")))
		},
	},
	{
		Name:    "a running pod whose init container had a device, after a restart",
		Mirrors: "B5",
		Kubelet: "is refused, although it runs: its init container does not",
		Here:    "keeps its devices",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			p := withInit(single("a", 1), container("init", limits{gpu: 1}))
			n.admit(p)
			n.restart(Boot{NotReady: true, Running: []Container{{"uid-a", "main"}}})
			if n.faulty() {
				n.refuse(p, noHealthy)
				return
			}
			n.admit(p)
			n.equal("number of devices", 1, len(n.has(p, "main")))
		},
	},
	{
		Name:    "a running pod whose plugin comes back late",
		Mirrors: "B11",
		Kubelet: "is refused, which is final",
		Here:    "keeps its devices",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			n.admit(single("a", 1))
			n.restart(Boot{Running: []Container{{"uid-a", "main"}}})
			if n.faulty() {
				n.refuse(single("a", 1), noHealthy)
				return
			}
			n.admit(single("a", 1))
			n.equal("number of devices", 1, len(n.has(single("a", 1), "main")))
		},
	},
	{
		Name:    "a manager whose state file is damaged",
		Mirrors: "B6; not covered upstream: checkpoint damage",
		Kubelet: "forgets the pod, and gives its device to another one",
		Here:    "never gives the device to another pod",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(1)...)
			n.admit(single("a", 1))
			testenv.Must(n, n.Stop())
			data, err := os.ReadFile(n.StateFile())
			testenv.Must(n, err)
			n.write(n.StateFile(), strings.ReplaceAll(string(data), "uid-a", "uid-q"))
			n.boot(Boot{})
			p.Stop()
			n.add(p)
			n.await("the device is counted", func() bool { return n.Counts(gpu).Capacity == 1 })
			if n.faulty() {
				n.admit(single("b", 1))
				n.equal("devices of the first pod", 0, len(n.has(single("a", 1), "main")))
				return
			}
			n.refuse(single("b", 1), "Available: 0")
		},
	},
}
