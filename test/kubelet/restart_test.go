package kubelet

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
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
		{"another instance takes over from the plugin", func(t *testing.T) {
			f.takeOver(t, shared.Program(t, "gpu-cdi-plugin"))
		}},
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

// TestPodsAreAdmittedWhileThePluginIsReplaced has another instance take over from the plugin while pods arrive one
// after the other. The kubelet refuses a pod for good if it has no devices at that moment.
func TestPodsAreAdmittedWhileThePluginIsReplaced(t *testing.T) {
	config := writeConfig(t, "sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, replicas: 20}]}}\n"+clean)
	f := setUp(t, "pcie-quad", config)
	f.awaitReplicas(t, 80)
	stop, names := make(chan struct{}), make(chan []string)
	go func() {
		var made []string
		for pace := time.NewTicker(200 * time.Millisecond); ; {
			select {
			case <-stop:
				names <- made
				return
			case <-pace.C:
			}
			p := newPod(fmt.Sprintf("stream-%d", len(made)), gpuName, 1)
			if len(made) == 60 {
				continue
			}
			if err := f.Apply(p); err != nil {
				t.Error(err)
			}
			made = append(made, p.Name)
		}
	}()
	var gaps []time.Duration
	for range 3 {
		gaps = append(gaps, f.takeOver(t, shared.Program(t, "gpu-cdi-plugin"), config))
	}
	close(stop)
	made := <-names
	for _, name := range made {
		s, err := f.Await(t.Context(), name, "is admitted", func(s PodStatus) bool { return s.Phase != "" })
		testenv.Must(t, err)
		if s.Phase == "Failed" {
			t.Errorf("pod %s: %s: %s", name, s.Reason, s.Message)
		}
	}
	t.Logf("the kubelet had no devices for %v; %d pods came", gaps, len(made))
}

// awaitReplicas waits until the kubelet has so many devices.
func (f *fixture) awaitReplicas(t *testing.T, want int) {
	t.Helper()
	err := kubenode.Wait(t.Context(), time.Minute, fmt.Sprintf("the kubelet has %d devices", want), func() error {
		all, err := f.Allocatable(t.Context())
		if got := len(all[gpuName]); err == nil && got != want {
			err = fmt.Errorf("it has %d", got)
		}
		return err
	})
	testenv.Must(t, err)
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
	err := kubenode.Wait(t.Context(), time.Minute, fmt.Sprintf("the node has %d of %s", want, resource), func() error {
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

// takeOver starts a program that takes over from the plugin, as in a rolling update, and then stops the old one. It
// returns for how long no plugin was connected to the kubelet; less than 0 if both were.
func (f *fixture) takeOver(t *testing.T, program string, flags ...string) time.Duration {
	t.Helper()
	old, before := f.plugin, len(f.plugin.Log())
	next := f.serveAs(t, program, append(flags, "--take-over")...)
	var ended, began time.Time
	err := kubenode.Wait(t.Context(), time.Minute, "the new plugin is connected", func() error {
		log := old.Log()[before:] // of both
		ended, began = logged(log, "no longer watches nvidia.com/gpu"), logged(log, "the kubelet watches nvidia.com/gpu")
		if ended.IsZero() || began.IsZero() {
			return errors.New(kubenode.Tail(log, 20))
		}
		return nil
	})
	testenv.Must(t, err)
	f.plugin = next
	if code, err := old.Stop(time.Minute); err != nil || code != 0 {
		t.Errorf("the old plugin has the exit status %d, %v", code, err)
	}
	return began.Sub(ended)
}

// logged returns the time of the last line of a log with a text, or zero.
func logged(log, text string) (at time.Time) {
	for line := range strings.Lines(log) {
		if _, rest, found := strings.Cut(line, "time="); found && strings.Contains(line, text) {
			stamp, _, _ := strings.Cut(rest, " ")
			at, _ = time.Parse(time.RFC3339Nano, stamp)
		}
	}
	return at
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
