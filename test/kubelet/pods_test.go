package kubelet

import (
	"slices"
	"testing"
)

// TestPodsSeeTheirGPUs runs pods with one GPU, two and none side by side, and then pods with all eight on either
// network.
func TestPodsSeeTheirGPUs(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	one, two, none := newPod("one", gpuName, 1), newPod("two", gpuName, 2), newPod("none", gpuName, 0)
	two.HostNetwork = true
	checkDisjoint(t, f.check(t, one, f.launch(t, one)), f.check(t, two, f.launch(t, two)))
	f.check(t, none, f.launch(t, none))
	if err := f.RemovePods(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, network := range []string{"bridge", "host"} {
		all := newPod(network, gpuName, 8)
		all.HostNetwork = network == "host"
		if ids := f.check(t, all, f.launch(t, all)); len(slices.Compact(ids)) != 8 {
			t.Errorf("a pod on the network %s that requested all GPUs has %v", network, ids)
		}
		if err := f.Remove(t.Context(), all.Name); err != nil {
			t.Fatal(err)
		}
	}
}

// TestARestartedContainerKeepsItsGPUs kills the container of a pod, which the kubelet restarts.
func TestARestartedContainerKeepsItsGPUs(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("again", gpuName, 2)
	first := f.launch(t, p)
	before := f.check(t, p, first)
	if err := f.ctr(t.Context(), "tasks", "kill", "--signal", "SIGKILL", first.Container); err != nil {
		t.Fatal(err)
	}
	s, err := f.Await(t.Context(), p.Name, "runs again", func(s PodStatus) bool {
		return s.Running && s.Container != first.Container
	})
	if err != nil {
		t.Fatal(err)
	}
	if after := f.check(t, p, s); !slices.Equal(before, after) {
		t.Errorf("the pod had %v and has %v", before, after)
	}
}
