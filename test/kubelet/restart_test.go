package kubelet

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestRunningPodsKeepTheirGPUs ends parts of the node, and the plugin, in every way while a pod runs. When all is back,
// the pod is the same, has the same GPUs, and sees them; and a new pod gets others.
func TestRunningPodsKeepTheirGPUs(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := pod("steady", gpuName, 2)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	for _, c := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"the plugin is killed and started", func(t *testing.T) { f.killPlugin(t); f.plugin = f.serve(t) }},
		{"the plugin is stopped and another version started", f.upgrade},
		{"the kubelet is killed and started", func(t *testing.T) { f.killKubelet(t); f.startKubelet(t) }},
		{"containerd is killed and started", f.restartContainerd},
		{"the kubelet is started again before the plugin", func(t *testing.T) {
			f.killPlugin(t)
			f.killKubelet(t)
			f.startKubelet(t)
			f.plugin = f.serve(t)
		}},
		{"the plugin is started again before the kubelet", func(t *testing.T) {
			f.killKubelet(t)
			f.killPlugin(t)
			f.plugin = f.serve(t)
			f.startKubelet(t)
		}},
		{"all three are killed and started", func(t *testing.T) {
			f.killKubelet(t)
			f.killPlugin(t)
			f.restartContainerd(t)
			f.startKubelet(t)
			f.plugin = f.serve(t)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.do(t)
			f.awaitDevices(t, gpuName, f.uuids(t))
			f.checkSteady(t, p, s, ids)
			fresh := pod("fresh", gpuName, 6)
			disjoint(t, ids, f.check(t, fresh, f.launch(t, fresh)))
			if err := f.Remove(t.Context(), fresh.Name); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestWithoutThePluginNoPodIsStarted kills the plugin. Its GPUs are then not to be had, and a pod that has some keeps
// them, even if the kubelet, too, is started anew. The node counts the GPUs as long as the kubelet remembers them.
func TestWithoutThePluginNoPodIsStarted(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := pod("steady", gpuName, 1)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	f.killPlugin(t)
	f.awaitDevices(t, gpuName, nil)
	f.awaitCapacity(t, gpuName, 8)
	f.checkSteady(t, p, s, ids)
	f.killKubelet(t)
	f.startKubelet(t)
	f.awaitDevices(t, gpuName, nil)
	f.awaitCapacity(t, gpuName, 0)
	f.checkSteady(t, p, s, ids)
	f.refused(t, pod("early", gpuName, 1))
	f.plugin = f.serve(t)
	f.awaitDevices(t, gpuName, f.uuids(t))
	f.awaitCapacity(t, gpuName, 8)
	f.checkSteady(t, p, s, ids)
}

// awaitCapacity waits until the kubelet says that the node has so much of a resource, healthy or not. Without an API
// server it says that in its log only, each time that it would report it.
func (f *fixture) awaitCapacity(t *testing.T, resource string, want int) {
	t.Helper()
	before := len(f.Kubelet.Log())
	err := wait(t.Context(), 30*time.Second, fmt.Sprintf("the node has %d of %s", want, resource), func() error {
		text := fmt.Sprintf(`"Updated capacity for device plugin" plugin="%s" capacity=`, resource)
		said := f.Kubelet.Log()[before:]
		i := strings.LastIndex(said, text)
		if i < 0 {
			return errors.New("it has not said")
		}
		if said = said[i+len(text):]; !strings.HasPrefix(said, strconv.Itoa(want)+"\n") {
			return fmt.Errorf("it has %.10q", said)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// checkSteady checks that a pod still runs as it did, with the devices that it had.
func (f *fixture) checkSteady(t *testing.T, p Pod, before PodStatus, ids []string) {
	t.Helper()
	s, err := f.Await(t.Context(), p.Name, "runs", func(s PodStatus) bool { return s.Running || s.Phase == "Failed" })
	if err != nil {
		t.Fatal(err)
	}
	if s.Container != before.Container || s.Restarts != before.Restarts {
		t.Errorf("pod %s was %+v and is %+v", p.Name, before, s)
	}
	if now := f.check(t, p, s); !slices.Equal(now, ids) {
		t.Errorf("pod %s had %v and has %v", p.Name, ids, now)
	}
}

func (f *fixture) killPlugin(t *testing.T) {
	t.Helper()
	if err := f.plugin.Kill(); err != nil {
		t.Fatal(err)
	}
}

// upgrade stops the plugin, as the upgrade of a DaemonSet does, and starts a copy of the program from another place.
func (f *fixture) upgrade(t *testing.T) {
	t.Helper()
	if code, err := f.plugin.Stop(20 * time.Second); err != nil || code != 0 {
		t.Errorf("the plugin that was asked to end has the exit status %d, %v", code, err)
	}
	f.plugin = f.serveAs(t, f.copyOfPlugin(t))
}

func (f *fixture) killKubelet(t *testing.T) {
	t.Helper()
	if err := f.Kubelet.Kill(); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) startKubelet(t *testing.T) {
	t.Helper()
	if err := f.StartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) restartContainerd(t *testing.T) {
	t.Helper()
	if err := f.Containerd.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := f.StartContainerd(t.Context()); err != nil {
		t.Fatal(err)
	}
}
