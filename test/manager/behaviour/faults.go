package behaviour

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
)

// faults are known faults of the kubelet's device manager that no other case covers.
var faults = []Case{
	{
		Name:    "the end of a plugin that another instance has replaced",
		Mirrors: "B1",
		Run: func(n *Node) {
			old := n.plug(gpu, numbered(4)...)
			fresh := n.plug(gpu, numbered(5)...)
			old.Stop()
			fresh.SetDevices(numbered(6)...)
			n.awaitCounts(gpu, Counts{Capacity: 6, Allocatable: 6})
			n.admit(single("a", 6))
		},
	},
	{
		Name:    "the end of the newest of two instances of a plugin",
		Mirrors: "B1",
		Run: func(n *Node) {
			old := n.plug(gpu, numbered(4)...)
			n.plug(gpu, numbered(5)...).Stop()
			old.SetDevices(numbered(6)...)
			n.awaitCounts(gpu, Counts{Capacity: 6, Allocatable: 6})
			n.await("the other instance allocates devices", func() bool { return n.try(single("a", 6)) == nil })
			n.equal("calls of Allocate", 1, old.Calls().Allocate)
		},
	},
	{
		Name:    "a second registration from a socket that is connected",
		Mirrors: "facts 2: next release",
		Kubelet: "is refused, and the first one stays; its end is not noticed then, and pods fail",
		Here:    "succeeds",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			err := p.Register(n.Context(), n.config.Dir)
			if !n.faulty() {
				if err != nil {
					n.Errorf("register: %v", err)
				}
				n.await("a second ListAndWatch", func() bool { return p.Calls().Watch == 2 })
				n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
				n.admit(single("a", 2))
				return
			}
			if err == nil || !strings.Contains(err.Error(), "device plugin already connected: "+p.Socket) {
				n.Errorf("register: %v", err)
			}
			n.equal("calls of ListAndWatch", 1, p.Calls().Watch)
			p.SetDevices(numbered(3)...)
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 3})
			n.admit(single("a", 3))
			p.Stop()
			n.plug(nic, device("n0")) // while the end could be noticed
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 3})
			n.refuse(single("b", 1), "")
		},
	},
	{
		Name:    "the end of a plugin after the registration of another instance failed",
		Mirrors: "B1b",
		Run: func(n *Node) {
			old := n.plug(gpu, numbered(2)...)
			bad := n.prepare(gpu, numbered(2)...)
			bad.Behave(does{GetOptions: func(context.Context) error { return fmt.Errorf("no options") }})
			n.serve(bad)
			if err := bad.Register(n.Context(), n.config.Dir); err == nil {
				n.Fatal("the registration succeeded")
			}
			n.admit(single("a", 1))
			old.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 0})
			n.refuse(single("b", 1), noHealthy)
		},
	},
	{
		Name:    "an Allocate answer without containers",
		Mirrors: "B2",
		Kubelet: "makes the devices unavailable until another pod is released",
		Here:    "refuses the pod and gives the devices back",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(2)...)
			p.Behave(does{Allocate: func(context.Context, []string) (*response, error) {
				return nil, nil //nolint:nilnil // the response has no container
			}})
			n.refuse(single("a", 2), "no containers return in allocation response")
			p.Behave(does{})
			if n.faulty() {
				n.refuse(single("b", 1), "Available: 0")
				return
			}
			n.admit(single("b", 2))
		},
	},
	{
		Name:     "a device that leaves the list during its Allocate call",
		Mirrors:  "B3",
		OursOnly: true,
		Kubelet:  "crashes the kubelet",
		Here:     "refuses the pod, or admits it with the device unhealthy",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a"))
			p.Behave(does{Allocate: func(ctx context.Context, ids []string) (*response, error) {
				p.SetDevices(device("b"), device("c"))
				n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
				return p.plain(ctx, ids)
			}})
			first := n.try(single("a", 1))
			p.Behave(does{})
			n.admit(single("b", 2))
			if first != nil && len(n.has(single("a", 1), "main")) > 0 {
				n.Errorf("the refused pod has %v", n.has(single("a", 1), "main"))
			}
		},
	},
	{
		Name:     "a pod whose device has left the list, when it is admitted again after a restart, with a Topology Manager",
		Mirrors:  "B4",
		OursOnly: true,
		Kubelet:  "crashes the kubelet, again after each further restart",
		Here:     "keeps what it has",
		Config:   Config{Policy: "best-effort"},
		Run: func(n *Node) {
			p := n.plug(gpu, device("a", 0))
			n.admit(single("a", 1))
			p.SetDevices(device("b", 0), device("c", 1))
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
			n.restart(Boot{})
			n.again(p, 2)
			n.admit(single("a", 1))
			n.equal("devices", []string{"a"}, n.has(single("a", 1), "main"))
		},
	},
	{
		Name:     "a plugin that does not answer Allocate",
		Mirrors:  "B9; not covered upstream: slow plugin",
		OursOnly: true,
		Kubelet:  "keeps the pod waiting for ever",
		Here:     "has its pod refused after a deadline",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(1)...)
			asked := make(chan struct{}, 1)
			p.Behave(does{Allocate: func(ctx context.Context, _ []string) (*response, error) {
				asked <- struct{}{}
				<-ctx.Done()
				return nil, ctx.Err()
			}})
			answer := make(chan error, 1)
			go func() { answer <- n.Admit(context.Background(), single("a", 1)) }()
			<-asked
			if err := <-answer; err == nil {
				n.Error("the pod was admitted")
			}
		},
	},
	{
		Name:     "pods of other resources while a plugin does not answer",
		Mirrors:  "not covered upstream: slow plugin",
		Kubelet:  "crash the kubelet if they are admitted meanwhile, so it admits pods one by one",
		Here:     "are admitted",
		OursOnly: true,
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(1)...)
			n.plug(nic, device("n0"))
			asked, answer := make(chan struct{}), make(chan struct{})
			p.Behave(does{Allocate: func(ctx context.Context, ids []string) (*response, error) {
				close(asked)
				<-answer
				return p.plain(ctx, ids)
			}})
			first := make(chan error, 1)
			go func() { first <- n.Admit(context.Background(), single("a", 1)) }()
			<-asked
			n.admit(pod("b", container("main", limits{nic: 1})))
			close(answer)
			if err := <-first; err != nil {
				n.Error(err)
			}
		},
	},
	{
		Name:     "2,000 admissions and releases, 32 at a time",
		Mirrors:  "B10; not covered upstream: concurrent admission",
		Kubelet:  "crash the kubelet, which admits pods one by one",
		Here:     "give no device twice, and lose none",
		OursOnly: true,
		Run:      manyAtOnce,
	},
	{
		Name:    "a list of more than 4 MiB",
		Mirrors: "B13; not covered upstream: 4 MiB list",
		Kubelet: "disconnects the plugin",
		Here:    "is taken",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(1)...)
			var list []*v1beta1.Device
			for i := range 20_000 {
				list = append(list, device(fmt.Sprintf("%0300d", i)))
			}
			p.SetDevices(list...)
			if n.faulty() {
				n.awaitCounts(gpu, Counts{Capacity: 1, Allocatable: 0})
				return
			}
			n.awaitCounts(gpu, Counts{Capacity: len(list), Allocatable: len(list)})
			n.admit(single("a", 2))
		},
	},
}

// manyAtOnce runs 32 clients that admit and release pods with 1 or 2 of 128 devices. Each client keeps a pod until its
// next one is admitted, so that a device that two pods get at once is noticed.
func manyAtOnce(n *Node) {
	n.plug(gpu, numbered(128)...)
	var holders sync.Map // pods by the ID of the device
	var running sync.WaitGroup
	for c := range 32 {
		running.Go(func() {
			var last *model.Pod
			for i := range 63 {
				p := single(fmt.Sprintf("%d-%d", c, i), 1+(c+i)%2)
				err := n.Admit(context.Background(), p)
				if err != nil {
					n.Errorf("%s was refused although there are devices for all: %v", p.Name, err)
					continue
				}
				n.hold(&holders, p)
				if last != nil {
					n.drop(&holders, *last)
				}
				last = &p
			}
			if last != nil {
				n.drop(&holders, *last)
			}
		})
	}
	running.Wait()
	n.admit(single("all", 128))
}

// hold records a pod's devices. It fails if another pod has one of them.
func (n *Node) hold(holders *sync.Map, p model.Pod) {
	ids := n.has(p, "main")
	if len(ids) != p.Containers[0].Limits[gpu] {
		n.Errorf("%s has %v", p.Name, ids)
	}
	for _, id := range ids {
		if other, held := holders.LoadOrStore(id, p.Name); held {
			n.Errorf("%s has %s, which %v has", p.Name, id, other)
		}
	}
}

// drop releases a pod.
func (n *Node) drop(holders *sync.Map, p model.Pod) {
	for _, id := range n.has(p, "main") {
		holders.CompareAndDelete(id, p.Name)
	}
	if err := n.Release(p); err != nil {
		n.Errorf("release %s: %v", p.Name, err)
	}
}

// hostile are cases about malicious plugins.
var hostile = []Case{
	{
		Name:    "a plugin whose endpoint is outside the directory",
		Mirrors: "not covered upstream: path escape",
		Kubelet: "is registered",
		Here:    "is refused",
		Run: func(n *Node) {
			outside := NewPlugin(gpu, filepath.Join(n.config.Registry, "..", "..", filepath.Base(n.config.Dir)+".sock"),
				numbered(1)...)
			n.serve(outside)
			defer outside.Stop()
			err := register(n.Context(), n.config.Dir, &v1beta1.RegisterRequest{
				Version: v1beta1.Version, ResourceName: gpu, Endpoint: "../" + filepath.Base(outside.Socket),
			})
			if n.faulty() != (err == nil) {
				n.Errorf("register: %v", err)
			}
			if n.faulty() {
				n.awaitCounts(gpu, Counts{Capacity: 1, Allocatable: 1})
				outside.Stop()
				n.awaitCounts(gpu, Counts{Capacity: 1, Allocatable: 0})
			} else {
				n.equal("counts", Counts{}, n.Counts(gpu))
			}
		},
	},
	{
		Name:    "a thousand lists in a second are taken, and the last one counts",
		Mirrors: "not covered upstream: hostile plugin",
		Run: func(n *Node) {
			p := n.plug(gpu, numbered(1)...)
			for i := range 1000 {
				p.SetDevices(numbered(1 + i%50)...)
			}
			p.SetDevices(numbered(7)...)
			n.awaitCounts(gpu, Counts{Capacity: 7, Allocatable: 7})
		},
	},
}
