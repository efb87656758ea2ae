package kubelet

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestALostGPUIsNotGiven makes a GPU fall off the bus, and come back.
func TestALostGPUIsNotGiven(t *testing.T) {
	f := setUp(t, "pcie-quad")
	all := f.uuids(t)
	f.awaitDevices(t, gpuName, all)
	if err := f.gpus.Lose(1); err != nil {
		t.Fatal(err)
	}
	f.reconcile(t)
	f.awaitDevices(t, gpuName, slices.Concat(all[:1], all[2:]))
	p := pod("rest", gpuName, 3)
	f.check(t, p, f.launch(t, p))
	f.refused(t, pod("late", gpuName, 1))
	if err := f.gpus.ClearGPU(1); err != nil {
		t.Fatal(err)
	}
	f.reconcile(t)
	f.awaitDevices(t, gpuName, all)
}

// reconcile makes the plugin look at the node now.
func (f *fixture) reconcile(t *testing.T) {
	t.Helper()
	if err := f.plugin.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

// TestStrategies gives a GPU in each of the ways: which devices are in the container, and what NVIDIA's own runtime would
// be told. That runtime is not here, so that with envvar alone there is no device.
func TestStrategies(t *testing.T) {
	const script = `cd /dev; for d in nvidia[0-9]*; do echo $d; done; echo "${NVIDIA_VISIBLE_DEVICES%%-*}"`
	for strategy, want := range map[string]string{
		"cdi-cri":                      "nvidia0 void",
		"cdi-annotations":              "nvidia0 void",
		"device-specs":                 "nvidia0 void",
		"device-specs,cdi-annotations": "nvidia0 void",
		"envvar":                       "nvidia[0-9]* GPU",
	} {
		t.Run(strategy, func(t *testing.T) {
			f := setUp(t, "workstation", "--strategy="+strategy)
			f.awaitDevices(t, gpuName, f.uuids(t))
			p := pod("strategy", gpuName, 1)
			s := f.launch(t, p)
			if got := strings.Join(strings.Fields(f.inPod(t, s, "sh", "-c", script)), " "); got != want {
				t.Errorf("in the container: %q, want %q", got, want)
			}
			id := f.given(t, p)[0]
			if got := f.inPod(t, s, "cat", "/run/gpu/devices/"+id+".json"); !strings.Contains(got, id) {
				t.Errorf("%s is described as %s", id, got)
			}
		})
	}
}

// TestTheKubeletFindsThePlugin registers by the kubelet's plugin watcher.
func TestTheKubeletFindsThePlugin(t *testing.T) {
	f := setUp(t, "workstation", "--registration=watcher")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := pod("found", gpuName, 1)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	f.killKubelet(t)
	f.startKubelet(t)
	f.awaitDevices(t, gpuName, f.uuids(t))
	f.checkSteady(t, p, s, ids)
}

// TestASecondInstanceEnds starts the plugin twice. The first goes on.
func TestASecondInstanceEnds(t *testing.T) {
	f := setUp(t, "workstation")
	f.awaitDevices(t, gpuName, f.uuids(t))
	second := f.serve(t)
	select {
	case <-second.process.Done():
	case <-time.After(20 * time.Second):
		t.Errorf("the second instance runs still: %v", second.Kill())
	}
	if code := second.process.Code(); code != 12 {
		t.Errorf("the second instance has the exit status %d, want 12", code)
	}
	p := pod("first", gpuName, 1)
	f.check(t, p, f.launch(t, p))
}

// TestSharedGPUs gives two pods a share of the same GPU.
func TestSharedGPUs(t *testing.T) {
	f := setUp(t, "workstation", config(t, `
gpus: {include: [0]}
sharing:
  time-slicing:
    rename-by-default: true
    resources: [{name: nvidia.com/gpu, replicas: 2}]
`))
	gpu := f.snapshot(t).Devices[0].UUID
	name := gpuName + ".shared"
	f.awaitDevices(t, name, []string{gpu + "::0", gpu + "::1"})
	a, b := pod("a", name, 1), pod("b", name, 1)
	sa, sb := f.launch(t, a), f.launch(t, b)
	disjoint(t, f.check(t, a, sa), f.check(t, b, sb))
	if seenA, seenB := f.seen(t, sa), f.seen(t, sb); !slices.Equal(seenA, []string{gpu}) || !slices.Equal(seenB, seenA) {
		t.Errorf("the pods see %v and %v, want %s in both", seenA, seenB, gpu)
	}
}
