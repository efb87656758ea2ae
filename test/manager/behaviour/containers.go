package behaviour

import (
	"context"
	"errors"
	"slices"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
)

var containers = []Case{
	{
		Name:    "PreStartContainer is called with all devices before each start",
		Mirrors: "TestDevicePreStartContainer",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(4)...)
			var calls [][]string
			p.Behave(does{Options: withPreStart, PreStart: func(_ context.Context, ids []string) error {
				calls = append(calls, slices.Sorted(slices.Values(ids)))
				return nil
			}})
			n.add(p)
			n.awaitCounts(gpu, Counts{Capacity: 4, Allocatable: 4})
			n.admit(single("a", 2))
			n.equal("calls", 0, len(calls))
			first := n.start(single("a", 2), "main")
			n.equal("options of the second start", first, n.start(single("a", 2), "main"))
			ids := n.has(single("a", 2), "main")
			n.equal("devices", [][]string{ids, ids}, calls)
		},
	},
	{
		Name:    "PreStartContainer is not called for a limit of 0",
		Mirrors: "TestDevicePreStartContainer",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(4)...)
			p.Behave(does{Options: withPreStart})
			n.add(p)
			n.awaitCounts(gpu, Counts{Capacity: 4, Allocatable: 4})
			n.admit(single("a", 0))
			n.start(single("a", 0), "main")
			n.equal("calls", []int{0, 0}, []int{p.Calls().PreStart, p.Calls().Allocate})
		},
	},
	{
		Name:    "an error of PreStartContainer fails the start, and the next one is tried again",
		Mirrors: "facts 1d: PreStartContainer",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(1)...)
			notYet := func(context.Context, []string) error { return errors.New("not yet") }
			p.Behave(does{Options: withPreStart, PreStart: notYet})
			n.add(p)
			n.awaitCounts(gpu, Counts{Capacity: 1, Allocatable: 1})
			n.admit(single("a", 1))
			_, err := n.Start(n.Context(), single("a", 1), "main")
			if err == nil || !strings.Contains(err.Error(), "device plugin PreStartContainer rpc failed with err:") {
				n.Errorf("start: %v", err)
			}
			p.Behave(does{})
			n.start(single("a", 1), "main")
		},
	},
	{
		Name:    "a container without devices starts with nothing",
		Mirrors: "TestDeviceRunContainerOptions: empty",
		Run: func(n *Node) {
			n.plug(gpu, numbered(1)...)
			p := pod("a", container("main", limits{gpu: 1}), container("plain", nil))
			n.admit(p)
			n.equal("options", model.RunOptions{}, n.start(p, "plain"))
		},
	},
	{
		Name:    "CDI devices of several resources are joined, and each is named once",
		Mirrors: "TestDeviceRunContainerOptions: CDI from several resources, duplicates",
		Run: func(n *Node) {
			answer := func(names ...string) func(context.Context, []string) (*response, error) {
				return func(context.Context, []string) (*response, error) {
					r := &response{}
					for _, name := range names {
						r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: name})
					}
					return r, nil
				}
			}
			n.plug(gpu, numbered(1)...).Behave(does{Allocate: answer("v.com/c=1", "v.com/c=1", "v.com/c=2")})
			n.plug(nic, device("n0")).Behave(does{Allocate: answer("v.com/c=2", "v.com/c=3")})
			p := pod("a", container("main", limits{gpu: 1, nic: 1}))
			n.admit(p)
			got := n.start(p, "main").CDIDevices
			n.equal("CDI devices", []string{"v.com/c=1", "v.com/c=2", "v.com/c=3"}, slices.Sorted(slices.Values(got)))
		},
	},
	{
		Name:    "two resources that set one variable, mount and device node differently",
		Mirrors: "facts 1d: Merge over resources",
		Kubelet: "set it at random like one of the two, and only the log reports the conflict",
		Here:    "set it like the resource whose name comes first, and the answer reports the conflict",
		Run: func(n *Node) {
			answer := func(value string) func(context.Context, []string) (*response, error) {
				return func(context.Context, []string) (*response, error) {
					return &response{
						Envs:   map[string]string{"KEY": value, "SAME": "same"},
						Mounts: []*v1beta1.Mount{{ContainerPath: "/m", HostPath: "/" + value}},
						Devices: []*v1beta1.DeviceSpec{
							{ContainerPath: "/dev/d", HostPath: "/dev/" + value, Permissions: "rw"},
						},
					}, nil
				}
			}
			n.plug(gpu, numbered(1)...).Behave(does{Allocate: answer("gpu")})
			n.plug(nic, device("n0")).Behave(does{Allocate: answer("nic")})
			p := pod("a", container("main", limits{gpu: 1, nic: 1}))
			n.admit(p)
			o := n.start(p, "main")
			n.equal("number of mounts and device nodes", []int{1, 1}, []int{len(o.Mounts), len(o.Devices)})
			if n.faulty() {
				n.equal("conflicts", 0, len(o.Conflicts))
				return
			}
			n.equal("variables", map[string]string{"KEY": "gpu", "SAME": "same"}, o.Envs)
			n.equal("number of conflicts", 3, len(o.Conflicts))
		},
	},
	{
		Name:    "the start of a container whose pod was released",
		Mirrors: "TestGetDeviceRunContainerOptions",
		Kubelet: "gets no options, and no error: it starts without devices",
		Here:    "is refused: no such pod is placed",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			n.admit(single("a", 1))
			n.release(single("a", 1))
			n.admit(single("b", 1)) // the kubelet frees devices of ended pods then
			o, err := n.Start(n.Context(), single("a", 1), "main")
			if n.faulty() {
				if err != nil {
					n.Errorf("start: %v", err)
				}
				n.equal("options", model.RunOptions{}, o)
			} else if err == nil {
				n.Errorf("the container was started with %v", o)
			}
		},
	},
	{
		Name:    "a start after a restart, before the plugin that wants PreStartContainer is back",
		Mirrors: "facts 1b: Restart, opts nil",
		Kubelet: "is done without PreStartContainer",
		Here:    "is refused until the plugin is back",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(1)...)
			p.Behave(does{Options: withPreStart})
			n.add(p)
			n.awaitCounts(gpu, Counts{Capacity: 1, Allocatable: 1})
			n.admit(single("a", 1))
			p.Stop()
			n.restart(Boot{})
			_, err := n.Start(n.Context(), single("a", 1), "main")
			if (err == nil) != n.faulty() {
				n.Errorf("start: %v", err)
			}
			n.again(p, 1)
			n.start(single("a", 1), "main")
			n.equal("calls", 1, p.Calls().PreStart)
		},
	},
}

var health = []Case{
	{
		Name:    "the health of a pod's devices follows the list, and each change is reported",
		Mirrors: "TestUpdateAllocatedResourcesStatus, TestFeatureGateResourceHealthStatus; e2e ..._pod_status_test.go",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a"))
			n.admit(single("a", 1))
			n.drain()
			n.equal("health", map[string]map[string]string{gpu: {"a": "Healthy"}}, n.Health(single("a", 1)))
			for _, d := range []*v1beta1.Device{unhealthy("a"), device("a")} {
				p.SetDevices(d)
				n.announced("uid-a")
				n.equal("health", map[string]map[string]string{gpu: {"a": d.Health}}, n.Health(single("a", 1)))
			}
			n.start(single("a", 1), "main") // a pod continues to run with an unhealthy device and after it
		},
	},
	{
		Name:    "the health of a device that is gone, or whose plugin is",
		Mirrors: "B7",
		Kubelet: "is Healthy, and no change is reported",
		Here:    "is Unknown, and that is reported",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a"), device("b"))
			n.admit(single("a", 2))
			n.drain()
			p.SetDevices(device("a"))
			n.awaitCounts(gpu, Counts{Capacity: 1, Allocatable: 1})
			want := map[string]string{"a": "Healthy", "b": "Unknown"}
			if n.faulty() {
				want["b"] = "Healthy"
			} else {
				n.announced("uid-a")
			}
			n.equal("health without device b", map[string]map[string]string{gpu: want}, n.Health(single("a", 2)))
			p.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 1, Allocatable: 0})
			if !n.faulty() {
				want["a"] = "Unknown"
				n.announced("uid-a")
			}
			n.equal("health without the plugin", map[string]map[string]string{gpu: want}, n.Health(single("a", 2)))
		},
	},
	{
		Name:    "a change of health of a device whose ID another resource has too",
		Mirrors: "B8",
		Run: func(n *Node) {
			pods := map[*Plugin]string{n.plug(gpu, device("0")): "uid-a", n.plug(nic, device("0")): "uid-b"}
			n.admit(single("a", 1))
			n.admit(pod("b", container("main", limits{nic: 1})))
			n.drain()
			wrong := 0
			for i := range 20 {
				for p, want := range pods {
					d := device("0")
					if i%2 == 0 {
						d.Health = v1beta1.Unhealthy
					}
					p.SetDevices(d)
					if uid := <-n.HealthChanges(); uid != want {
						wrong++
					}
				}
			}
			if wrong > 0 {
				n.Errorf("%d of 40 changes were announced for the wrong pod", wrong)
			}
		},
	},
}

// drain receives the pending health changes.
func (n *Node) drain() {
	for {
		select {
		case <-n.HealthChanges():
		default:
			return
		}
	}
}

// announced waits for a change of health of a pod's device.
func (n *Node) announced(uid string) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.Context(), patience)
	defer cancel()
	select {
	case got := <-n.HealthChanges():
		n.equal("the pod of the change", uid, got)
	case <-ctx.Done():
		n.Errorf("no change of health was announced for %s", uid)
	}
}
