package kubelet

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

// TestRunningPodsKeepTheirGPUs restarts the plugin, the kubelet and containerd, in every order, while a pod runs.
// Afterwards the pod is the same and sees the same GPUs, and a new pod gets others.
func TestRunningPodsKeepTheirGPUs(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("steady", gpuName, 2)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	for _, c := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"the plugin is killed and started", func(t *testing.T) { f.killPlugin(t); f.plugin = f.serve(t) }},
		{"the plugin is stopped and another copy started", f.upgrade},
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
			f.checkUnchanged(t, p, s, ids)
			fresh := newPod("fresh", gpuName, 6)
			checkDisjoint(t, ids, f.check(t, fresh, f.launch(t, fresh)))
			testenv.Must(t, f.Remove(t.Context(), fresh.Name))
		})
	}
}

// TestWithoutThePluginNoPodIsStarted kills the plugin. Its GPUs are then not allocatable. A pod keeps its GPU, even if
// the kubelet restarts. The GPUs count as the node's capacity until the kubelet restarts.
func TestWithoutThePluginNoPodIsStarted(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("steady", gpuName, 1)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	f.killPlugin(t)
	f.awaitDevices(t, gpuName, nil)
	f.awaitCapacity(t, gpuName, 8)
	f.checkUnchanged(t, p, s, ids)
	f.killKubelet(t)
	f.startKubelet(t)
	f.awaitDevices(t, gpuName, nil)
	f.awaitCapacity(t, gpuName, 0)
	f.checkUnchanged(t, p, s, ids)
	f.expectRefusal(t, newPod("early", gpuName, 1))
	f.plugin = f.serve(t)
	f.awaitDevices(t, gpuName, f.uuids(t))
	f.awaitCapacity(t, gpuName, 8)
	f.checkUnchanged(t, p, s, ids)
}

// awaitCapacity waits until the node's capacity of a resource, healthy or not, is as wanted. Without an API server the
// kubelet reports it in its log only.
func (f *fixture) awaitCapacity(t *testing.T, resource string, want int) {
	t.Helper()
	before := len(f.Kubelet.Log())
	err := wait(t.Context(), time.Minute, fmt.Sprintf("the node has %d of %s", want, resource), func() error {
		text := fmt.Sprintf(`"Updated capacity for device plugin" plugin="%s" capacity=`, resource)
		log := f.Kubelet.Log()[before:]
		i := strings.LastIndex(log, text)
		if i < 0 {
			return errors.New("the kubelet has not logged it")
		}
		if log = log[i+len(text):]; !strings.HasPrefix(log, strconv.Itoa(want)+"\n") {
			return fmt.Errorf("it has %.10q", log)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// checkUnchanged checks that a pod runs on, in the same container, with the same devices.
func (f *fixture) checkUnchanged(t *testing.T, p Pod, before PodStatus, ids []string) {
	t.Helper()
	s, err := f.Await(t.Context(), p.Name, "runs", func(s PodStatus) bool { return s.Running || s.Phase == "Failed" })
	testenv.Must(t, err)
	if s.Container != before.Container || s.Restarts != before.Restarts {
		t.Errorf("pod %s was %+v and is %+v", p.Name, before, s)
	}
	if now := f.check(t, p, s); !slices.Equal(now, ids) {
		t.Errorf("pod %s had %v and has %v", p.Name, ids, now)
	}
}

func (f *fixture) killPlugin(t *testing.T) {
	t.Helper()
	testenv.Must(t, f.plugin.Kill())
}

// upgrade stops the plugin and starts a copy of the program from another path, as the upgrade of a DaemonSet does.
func (f *fixture) upgrade(t *testing.T) {
	t.Helper()
	if code, err := f.plugin.Stop(time.Minute); err != nil || code != 0 {
		t.Errorf("the plugin that was stopped has the exit status %d, %v", code, err)
	}
	f.plugin = f.serveAs(t, f.copyOfPlugin(t))
}

func (f *fixture) killKubelet(t *testing.T) {
	t.Helper()
	testenv.Must(t, f.Kubelet.Kill())
}

func (f *fixture) startKubelet(t *testing.T) {
	t.Helper()
	testenv.Must(t, f.StartKubelet(t.Context()))
}

func (f *fixture) restartContainerd(t *testing.T) {
	t.Helper()
	testenv.Must(t, f.Containerd.Kill())
	testenv.Must(t, f.StartContainerd(t.Context()))
}
