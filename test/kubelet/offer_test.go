package kubelet

import (
	"slices"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// reconcile makes the plugin reconcile now.
func (f *fixture) reconcile(t *testing.T) {
	t.Helper()
	testenv.Must(t, f.plugin.Signal(syscall.SIGHUP))
}

// TestStrategies allocates a GPU with each strategy. It checks the devices in the container, whether nvidia-smi lists
// the GPU, and the variable that NVIDIA's runtime reads. That runtime is not installed, so envvar alone leads to no
// device.
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
			p := newPod("strategy", gpuName, 1)
			s := f.launch(t, p)
			if got := strings.Join(strings.Fields(f.inPod(t, s, "sh", "-c", script)), " "); got != want {
				t.Errorf("in the container: %q, want %q", got, want)
			}
			id := f.given(t, p)[0]
			if strategy != "envvar" {
				f.check(t, p, s)
			}
			if got := f.inPod(t, s, "cat", "/run/gpu/devices/"+id+".json"); !strings.Contains(got, id) {
				t.Errorf("%s is described as %s", id, got)
			}
		})
	}
}

// TestTheKubeletDiscoversThePlugin registers by the kubelet's plugin watcher, also when another instance takes over.
func TestTheKubeletDiscoversThePlugin(t *testing.T) {
	f := setUp(t, "workstation", "--registration=watcher")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("discovered", gpuName, 1)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	f.killKubelet(t)
	f.startKubelet(t)
	f.awaitDevices(t, gpuName, f.uuids(t))
	f.checkUnchanged(t, p, s, ids)
	f.takeOver(t, shared.Program(t, "gpu-cdi-plugin"), "--registration=watcher")
	f.awaitDevices(t, gpuName, f.uuids(t))
	f.checkUnchanged(t, p, s, ids)
}

// TestSharedGPUs allocates replicas of one GPU to two pods.
func TestSharedGPUs(t *testing.T) {
	f := setUp(t, "workstation", writeConfig(t, `
gpus: {include: [0]}
sharing:
  time-slicing:
    rename-by-default: true
    resources: [{name: nvidia.com/gpu, replicas: 2}]
`))
	gpu := f.snapshot(t).Devices[0].UUID
	name := gpuName + ".shared"
	f.awaitDevices(t, name, []string{gpu + "::0", gpu + "::1"})
	a, b := newPod("a", name, 1), newPod("b", name, 1)
	sa, sb := f.launch(t, a), f.launch(t, b)
	checkDisjoint(t, f.check(t, a, sa), f.check(t, b, sb))
	for _, s := range []PodStatus{sa, sb} {
		if seen := f.listGPUs(t, s); !slices.Equal(seen, []string{gpu}) {
			t.Errorf("pod %s sees %v, want %s", s.Name, seen, gpu)
		}
	}
}
