package behaviour

import (
	"context"
	"errors"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

var devices = []Case{
	{
		Name:    "each list replaces the one before: 3/2, 2/2, 3/1, 2/0",
		Mirrors: "TestUpdateCapacityAllocatable",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a"), device("b"), unhealthy("c"))
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 2})
			p.SetDevices(device("a"), device("b"))
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
			p.SetDevices(device("a"), unhealthy("b"), unhealthy("c"))
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 1})
			p.SetDevices(unhealthy("b"), unhealthy("c"))
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 0})
			p.SetDevices()
			n.awaitCounts(gpu, Counts{Capacity: 0, Allocatable: 0})
		},
	},
	{
		Name:    "only the health Healthy is healthy",
		Mirrors: "facts 1b: ListAndWatch message",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a"))
			p.SetDevices(device("a"), &v1beta1.Device{ID: "b", Health: "weird"}, &v1beta1.Device{ID: "c"},
				&v1beta1.Device{ID: "d", Health: "healthy"})
			n.awaitCounts(gpu, Counts{Capacity: 4, Allocatable: 1})
		},
	},
	{
		Name:    "devices that pods have are not subtracted",
		Mirrors: "facts 1b: Capacity / allocatable",
		Run: func(n *Node) {
			n.plug(gpu, numbered(3)...)
			n.admit(single("a", 2))
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 3})
		},
	},
	{
		Name:    "a device listed twice with different health",
		Mirrors: "not covered upstream: duplicate IDs",
		Kubelet: "counts as two devices, one of them healthy",
		Here:    "is one device, healthy if it is listed so each time",
		Run: func(n *Node) {
			p := n.plug(gpu, device("x"))
			p.SetDevices(unhealthy("a"), device("a"), unhealthy("b"))
			if n.faulty() {
				n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 1})
			} else {
				n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 0})
			}
		},
	},
	{
		Name:    "a plugin that ends leaves its devices unhealthy, and one that returns makes them healthy",
		Mirrors: "e2e device_plugin_failures_test.go: plugin stop; TestEndpointSyncOnDisconnect",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a"), unhealthy("b"))
			p.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 0})
			n.refuse(single("late", 1), "no healthy devices present; cannot allocate unhealthy devices "+gpu)
			p.SetDevices(numbered(2)...)
			n.again(p, 2)
			n.admit(single("on-time", 2))
		},
	},
	{
		Name:    "the devices of a plugin that was gone for five minutes are gone too",
		Mirrors: "TestUpdateCapacityAllocatable: expiry; e2e: 0/2 then 0/0",
		Config:  Config{Grace: 2 * time.Second},
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			p.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 0})
			n.Expire()
			n.awaitCounts(gpu, Counts{Capacity: 0, Allocatable: 0})
			n.again(p, 2)
			n.admit(single("on-time", 2))
		},
	},
	{
		Name:    "a resource that is gone while a pod has a device of it refuses pods",
		Mirrors: "TestPodContainerDeviceToAllocate; TestUpdateCapacityAllocatable: expiry",
		Config:  Config{Grace: 2 * time.Second},
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			n.admit(single("a", 1))
			p.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 0})
			n.Expire()
			n.awaitCounts(gpu, Counts{Capacity: 0, Allocatable: 0})
			n.refuse(single("late", 1), "cannot allocate unregistered device example.com/gpu")
		},
	},
	{
		Name:    "a list that fails at once is not asked for again",
		Mirrors: "e2e device_plugin_failures_test.go: ListAndWatch fails at once",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(2)...)
			failed := make(chan struct{}, 8)
			p.Behave(does{Watch: func(context.Context) error { failed <- struct{}{}; return errors.New("no list") }})
			n.add(p)
			<-failed
			n.plug("example.com/other", numbered(1)...) // while the manager could ask again
			n.equal("counts", Counts{}, n.Counts(gpu))
			n.equal("calls of ListAndWatch", 1, p.Calls().Watch)
		},
	},
	{
		Name:    "devices with any ID are counted",
		Mirrors: "facts 1b: IDs are not validated",
		Run: func(n *Node) {
			n.plug(gpu, device("0"), device("GPU/with spaces \u00e9"), device(string(make([]byte, 300))))
		},
	},
}
