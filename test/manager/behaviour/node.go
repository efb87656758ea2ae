package behaviour

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// patience is how long a case waits before it fails.
const patience = time.Minute

// gpu is the resource of most cases.
const gpu = "example.com/gpu"

// Node is a node with a device manager, for one case.
type Node struct {
	*testing.T
	Manager
	config  Config
	kubelet bool // see faulty
	differs bool
	asked   bool
	plugins int
}

// faulty reports whether the manager must do what the case says about the kubelet.
func (n *Node) faulty() bool {
	n.Helper()
	if !n.differs {
		n.Fatal("the case does not say how the kubelet differs")
	}
	n.asked = true
	return n.kubelet
}

func (n *Node) boot(b Boot) {
	n.Helper()
	if err := n.Boot(b); err != nil {
		n.Fatalf("start the manager: %v", err)
	}
}

// restart stops and starts the manager.
func (n *Node) restart(b Boot) {
	n.Helper()
	if err := n.Stop(); err != nil {
		n.Fatalf("stop the manager: %v", err)
	}
	n.boot(b)
}

// prepare returns a plugin that neither serves nor is registered. The plugin is stopped when the case ends.
func (n *Node) prepare(resource string, list ...*v1beta1.Device) *Plugin {
	n.plugins++
	p := NewPlugin(resource, filepath.Join(n.config.Dir, fmt.Sprintf("plugin%d.sock", n.plugins)), list...)
	n.Cleanup(p.Stop)
	return p
}

// add serves and registers a plugin.
func (n *Node) add(p *Plugin) *Plugin {
	n.Helper()
	n.serve(p)
	n.register(p)
	return p
}

func (n *Node) serve(p *Plugin) {
	n.Helper()
	testenv.Must(n, p.Serve())
}

func (n *Node) register(p *Plugin) {
	n.Helper()
	if err := p.Register(n.Context(), n.config.Dir); err != nil {
		n.Fatalf("register %s: %v", p.Resource, err)
	}
}

// plug adds a plugin with devices and waits until the manager counts them.
func (n *Node) plug(resource string, list ...*v1beta1.Device) *Plugin {
	n.Helper()
	p := n.add(n.prepare(resource, list...))
	healthy := 0
	for _, d := range list {
		if d.Health == v1beta1.Healthy {
			healthy++
		}
	}
	n.awaitCounts(resource, Counts{Capacity: len(list), Allocatable: healthy})
	return p
}

// again registers a plugin after a restart of the manager, which removes the plugin's socket, and waits for its
// devices.
func (n *Node) again(p *Plugin, capacity int) {
	n.Helper()
	p.Stop()
	n.add(p)
	n.awaitCounts(p.Resource, Counts{Capacity: capacity, Allocatable: capacity})
}

// awaitCounts waits until the manager has these counts.
func (n *Node) awaitCounts(resource string, want Counts) {
	n.Helper()
	defer func() {
		if n.Failed() {
			n.Logf("the manager counts %+v of %s", n.Counts(resource), resource)
		}
	}()
	n.await(fmt.Sprintf("%+v of %s", want, resource), func() bool { return n.Counts(resource) == want })
}

// await waits until ok returns true.
func (n *Node) await(what string, ok func() bool) {
	n.Helper()
	testenv.Eventually(n.T, what, ok)
}

// limits are numbers of devices by resource.
type limits = map[string]int

// pod returns a pod with containers.
func pod(name string, containers ...model.Container) model.Pod {
	return model.Pod{UID: "uid-" + name, Namespace: "default", Name: name, Containers: containers}
}

// single returns a pod whose container main requests that many GPUs.
func single(name string, count int) model.Pod {
	return pod(name, container("main", limits{gpu: count}))
}

func container(name string, l limits) model.Container { return model.Container{Name: name, Limits: l} }

func sidecar(name string, l limits) model.Container {
	return model.Container{Name: name, Limits: l, Sidecar: true}
}

// withInit puts init containers before the containers of a pod.
func withInit(p model.Pod, list ...model.Container) model.Pod {
	p.InitContainers = list
	return p
}

// admit admits a pod that must be admitted.
func (n *Node) admit(p model.Pod) {
	n.Helper()
	if err := n.try(p); err != nil {
		n.Fatalf("admit %s: %v", p.Name, err)
	}
}

// try admits a pod.
func (n *Node) try(p model.Pod) error {
	ctx, cancel := context.WithTimeout(n.Context(), time.Minute)
	defer cancel()
	return n.Admit(ctx, p)
}

// refuse checks that a pod is refused with a text.
func (n *Node) refuse(p model.Pod, text string) {
	n.Helper()
	if err := n.try(p); err == nil || !strings.Contains(err.Error(), text) {
		n.Errorf("admit %s: %v, want the error %q", p.Name, err, text)
	}
}

func (n *Node) release(p model.Pod) {
	n.Helper()
	if err := n.Release(p); err != nil {
		n.Fatalf("release %s: %v", p.Name, err)
	}
}

// start starts a container that must start.
func (n *Node) start(p model.Pod, container string) model.RunOptions {
	n.Helper()
	o, err := n.Start(n.Context(), p, container)
	if err != nil {
		n.Fatalf("start %s of %s: %v", container, p.Name, err)
	}
	return o
}

// has returns the GPUs of a container.
func (n *Node) has(p model.Pod, container string) []string { return n.Devices(p, container)[gpu] }

// equal fails unless a value is as wanted.
func (n *Node) equal(what string, want, got any) {
	n.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		n.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// disjoint checks that no device is in two lists.
func (n *Node) disjoint(lists ...[]string) {
	n.Helper()
	seen := map[string]bool{}
	for _, list := range lists {
		for _, id := range list {
			if seen[id] {
				n.Errorf("device %s was given twice: %v", id, lists)
			}
			seen[id] = true
		}
	}
}

// write writes a file.
func (n *Node) write(path, content string) {
	n.Helper()
	testenv.Must(n, os.WriteFile(path, []byte(content), 0o600))
}
