package behaviour

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

const nic = "example.com/nic"

var admission = []Case{
	{
		Name:    "a container gets as many devices of each resource as its limits say",
		Mirrors: "TestPodContainerDeviceAllocation",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			n.plug(nic, device("n0"))
			p := pod("a", container("main", limits{gpu: 2, nic: 1}))
			n.admit(p)
			n.equal("devices", map[string][]string{gpu: {"d000", "d001"}, nic: {"n0"}}, n.Devices(p, "main"))
			n.refuse(single("b", 1),
				"requested number of devices unavailable for example.com/gpu. Requested: 1, Available: 0")
		},
	},
	{
		Name:    "a pod with a limit of a resource that no plugin offers",
		Mirrors: "facts 1c: Unknown resources; TestUpdateCapacityAllocatable: expiry",
		Kubelet: "is admitted without it: the scheduler and the node's predicates should prevent that",
		Here:    "is refused",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			p := pod("a", container("main", limits{gpu: 1, "example.com/unknown": 1}))
			if n.faulty() {
				n.admit(p)
				n.equal("devices", map[string][]string{gpu: n.has(p, "main")}, n.Devices(p, "main"))
				return
			}
			n.refuse(p, "cannot allocate unregistered device example.com/unknown")
			n.admit(single("b", 2))
		},
	},
	{
		Name:    "a pod that asks for too much is refused, and what is left goes to others",
		Mirrors: "TestPodContainerDeviceAllocation: shortage",
		Run: func(n *Node) {
			n.plug(gpu, numbered(3)...)
			n.admit(single("a", 1))
			n.refuse(single("b", 3), "UnexpectedAdmissionError: Allocate failed due to requested number of devices "+
				"unavailable for example.com/gpu. Requested: 3, Available: 2, which is unexpected")
			n.admit(single("c", 2))
			n.disjoint(n.has(single("a", 1), "main"), n.has(single("c", 2), "main"))
		},
	},
	{
		Name:    "a resource without healthy devices refuses pods, also with a limit of 0",
		Mirrors: "TestPodContainerDeviceToAllocate",
		Run: func(n *Node) {
			n.plug(gpu, unhealthy("a"))
			for _, count := range []int{1, 0} {
				n.refuse(single("a", count), "Allocate failed due to no healthy devices present; "+
					"cannot allocate unhealthy devices example.com/gpu, which is unexpected")
			}
		},
	},
	{
		Name:    "a pod whose devices have become unhealthy, when it is admitted again after a restart",
		Mirrors: "TestPodContainerDeviceToAllocate",
		Kubelet: "is refused, which is final",
		Here:    "keeps its devices, and their health is reported",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a"), device("b"))
			n.admit(single("a", 1))
			held := n.has(single("a", 1), "main")[0]
			list := []*v1beta1.Device{device("a"), device("b")}
			for _, d := range list {
				if d.ID == held {
					d.Health = v1beta1.Unhealthy
				}
			}
			n.restart(Boot{})
			p.Stop()
			p.SetDevices(list...)
			n.add(p)
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 1})
			if n.faulty() {
				n.refuse(single("a", 1), "Allocate failed due to previously allocated devices are no longer healthy; "+
					"cannot allocate unhealthy devices example.com/gpu, which is unexpected")
			} else {
				n.admit(single("a", 1))
			}
		},
	},
	{
		Name:    "a pod that is admitted again keeps its devices, and the plugin is not asked",
		Mirrors: "facts 1c: Pre-allocated",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(8)...)
			n.admit(single("a", 3))
			before := n.has(single("a", 3), "main")
			for range 5 {
				n.admit(single("a", 3))
			}
			n.equal("devices", before, n.has(single("a", 3), "main"))
			n.equal("calls of Allocate", 1, p.Calls().Allocate)
		},
	},
	{
		Name:    "a pod that is admitted again with another limit is refused",
		Mirrors: "facts 1c: Pre-allocated",
		Run: func(n *Node) {
			n.plug(gpu, numbered(8)...)
			n.admit(single("a", 3))
			n.refuse(single("a", 2),
				`pod "uid-a" container "main" changed request for resource "example.com/gpu" from 3 to 2`)
		},
	},
	{
		Name:    "the devices of a pod that is released go to others",
		Mirrors: "TestPodContainerDeviceAllocation; e2e: [OrphanedPods]",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			for range 3 {
				n.admit(single("a", 2))
				n.refuse(single("b", 1), "Available: 0")
				n.release(single("a", 2))
				n.admit(single("b", 2))
				n.release(single("b", 2))
			}
		},
	},
	{
		Name:    "what the plugin answers reaches the container unchanged",
		Mirrors: "TestAllocate of endpoint_test.go",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(1)...)
			p.Behave(does{Allocate: func(context.Context, []string) (*response, error) {
				return &response{
					Envs: map[string]string{"KEY": "value = \u00e9"},
					Mounts: []*v1beta1.Mount{
						{
							ContainerPath: "/a",
							HostPath:      "/host/a",
							ReadOnly:      true,
						}, {ContainerPath: "/b", HostPath: "/host/b"},
					},
					Devices: []*v1beta1.DeviceSpec{
						{ContainerPath: "/dev/a", HostPath: "/dev/host-a", Permissions: "mrw"},
						{ContainerPath: "/dev/b", HostPath: "/dev/host-b", Permissions: "r"},
					},
					Annotations: map[string]string{"example.com/key": "value"},
					CdiDevices:  []*v1beta1.CDIDevice{{Name: "example.com/gpu=0"}, {Name: "example.com/gpu=1"}},
				}, nil
			}})
			n.admit(single("a", 1))
			n.equal("options", model.RunOptions{
				Envs: map[string]string{"KEY": "value = \u00e9"},
				Mounts: []model.Mount{
					{
						ContainerPath: "/a",
						HostPath:      "/host/a",
						ReadOnly:      true,
					}, {ContainerPath: "/b", HostPath: "/host/b"},
				},
				Devices: []model.DeviceNode{
					{ContainerPath: "/dev/a", HostPath: "/dev/host-a", Permissions: "mrw"},
					{ContainerPath: "/dev/b", HostPath: "/dev/host-b", Permissions: "r"},
				},
				Annotations: map[string]string{"example.com/key": "value"},
				CDIDevices:  []string{"example.com/gpu=0", "example.com/gpu=1"},
			}, n.start(single("a", 1), "main"))
		},
	},
	{
		Name:    "a pod whose plugin refuses it gets nothing, and its devices are free",
		Mirrors: "facts 1c: RPC failure",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			p.Behave(does{Allocate: func(context.Context, []string) (*response, error) {
				return nil, errors.New("these are mine")
			}})
			n.refuse(single("a", 2), "these are mine")
			p.Behave(does{})
			n.admit(single("b", 2))
		},
	},
	{
		Name:    "a plugin that gives only some resources of a pod",
		Mirrors: "facts 1c: Partial multi-resource success",
		Kubelet: "leaves them with the refused pod until another pod is admitted",
		Here:    "gives all back at once: nothing is held by a pod that was refused",
		Run: func(n *Node) {
			n.plug(gpu, numbered(1)...)
			p := n.plug(nic, device("n0"))
			p.Behave(does{Allocate: func(context.Context, []string) (*response, error) {
				return nil, errors.New("no")
			}})
			refused := withInit(pod("a", container("main", limits{nic: 1})), container("init", limits{gpu: 1}))
			n.refuse(refused, "no")
			if n.faulty() {
				n.equal("devices of the refused pod", []string{"d000"}, n.has(refused, "init"))
			} else {
				n.equal("devices of the refused pod", 0, len(n.has(refused, "init")))
			}
			n.admit(single("b", 1))
		},
	},
	{
		Name:    "other pods can be released and listed while a plugin is asked what it prefers",
		Mirrors: "TestDevicesToAllocateConflictWithUpdateAllocatedDevices",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(4)...)
			p.Behave(does{Options: withPreference})
			n.add(p)
			n.awaitCounts(gpu, Counts{Capacity: 4, Allocatable: 4})
			n.admit(single("a", 1))
			asked, answer := make(chan struct{}), make(chan struct{})
			p.Behave(does{Preferred: func(_ context.Context, r *available) ([]string, error) {
				close(asked)
				<-answer
				return r.AvailableDeviceIDs[:2], nil
			}})
			var running sync.WaitGroup
			running.Go(func() {
				if err := n.try(single("b", 2)); err != nil {
					n.Errorf("admit b: %v", err)
				}
			})
			<-asked
			n.release(single("a", 1))
			n.listPods()
			close(answer)
			running.Wait()
			n.equal("number of devices", 2, len(n.has(single("b", 2), "main")))
		},
	},
	{
		Name:    "the list changes a thousand times while pods are admitted and released",
		Mirrors: "TestGetTopologyHintsWithUpdates",
		Config:  Config{Policy: "best-effort"},
		Run: func(n *Node) {
			var list []*v1beta1.Device
			for i, d := range numbered(100) {
				list = append(list, device(d.ID, int64(i%2)))
			}
			p := n.plug(gpu, list...)
			var done atomic.Bool
			var running sync.WaitGroup
			running.Go(func() {
				for i := range 1000 {
					p.SetDevices(slices.Concat(list[i%50:], list[:i%50])...)
				}
				done.Store(true)
			})
			for !done.Load() {
				n.admit(single("a", 3))
				n.release(single("a", 3))
			}
			running.Wait()
			n.awaitCounts(gpu, Counts{Capacity: 100, Allocatable: 100})
		},
	},
}

var initContainers = []Case{
	{
		Name:    "devices of init containers are reused by later containers, and those of containers are not",
		Mirrors: "TestInitContainerDeviceAllocation",
		Run: func(n *Node) {
			n.plug(gpu, numbered(4)...)
			p := withInit(pod("a", container("c1", limits{gpu: 1}), container("c2", limits{gpu: 1})),
				container("i1", limits{gpu: 1}), container("i2", limits{gpu: 2}))
			n.admit(p)
			n.subset("i1", n.has(p, "i1"), "i2", n.has(p, "i2"))
			n.subset("c1", n.has(p, "c1"), "i2", n.has(p, "i2"))
			n.subset("c2", n.has(p, "c2"), "i2", n.has(p, "i2"))
			n.disjoint(n.has(p, "c1"), n.has(p, "c2"))
			n.admit(single("b", 2))
			n.refuse(single("c", 1), "Available: 0")
		},
	},
	{
		Name:    "a sidecar may have an init container's devices, and shares none with what runs beside it",
		Mirrors: "TestRestartableInitContainerDeviceAllocation",
		Run: func(n *Node) {
			n.plug(gpu, numbered(5)...)
			p := withInit(pod("a", container("c1", limits{gpu: 1}), container("c2", limits{gpu: 1})),
				container("i1", limits{gpu: 2}), sidecar("s1", limits{gpu: 1}), sidecar("s2", limits{gpu: 1}))
			n.admit(p)
			n.subset("s1", n.has(p, "s1"), "i1", n.has(p, "i1"))
			n.subset("s2", n.has(p, "s2"), "i1", n.has(p, "i1"))
			n.disjoint(n.has(p, "s1"), n.has(p, "s2"), n.has(p, "c1"), n.has(p, "c2"))
		},
	},
	{
		Name:    "an init container after a sidecar does not get the sidecar's devices",
		Mirrors: "TestRestartableInitContainerDeviceAllocation; e2e: init and sidecar",
		Run: func(n *Node) {
			n.plug(gpu, numbered(3)...)
			p := withInit(pod("a", container("main", limits{gpu: 2})),
				sidecar("side", limits{gpu: 1}), container("init", limits{gpu: 2}))
			n.admit(p)
			n.disjoint(n.has(p, "side"), n.has(p, "init"))
			n.equal("devices of main", n.has(p, "init"), n.has(p, "main"))
		},
	},
	{
		Name:    "devices of an init container that has ended",
		Mirrors: "B12",
		Kubelet: "stay with the pod until it is gone",
		Here:    "are free when the container has ended, unless another container of the pod has them",
		Run: func(n *Node) {
			n.plug(gpu, numbered(8)...)
			p := withInit(pod("a", container("main", limits{gpu: 2})), container("init", limits{gpu: 4}))
			n.admit(p)
			n.refuse(single("b", 5), "Available: 4")
			testenv.Must(n, n.Ended(p, "init"))
			if n.faulty() {
				n.refuse(single("b", 5), "Available: 4")
				return
			}
			n.admit(single("b", 6))
			n.disjoint(n.has(p, "main"), n.has(single("b", 6), "main"))
		},
	},
}

// subset checks that the devices of a container are all another one's.
func (n *Node) subset(name string, ids []string, of string, all []string) {
	n.Helper()
	have := map[string]bool{}
	for _, id := range all {
		have[id] = true
	}
	for _, id := range ids {
		if !have[id] {
			n.Errorf("%s has device %s, which %s does not have: %v, %v", name, id, of, ids, all)
		}
	}
	if len(ids) == 0 {
		n.Errorf("%s has no devices", name)
	}
}
