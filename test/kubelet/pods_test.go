package kubelet

import (
	"slices"
	"testing"
)

// TestPodsSeeTheGPUsTheyAreGiven runs pods beside each other: one has a GPU, one two, one none; and then one all
// eight, on either network.
func TestPodsSeeTheGPUsTheyAreGiven(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	one, two, none := pod("one", gpuName, 1), pod("two", gpuName, 2), pod("none", gpuName, 0)
	two.HostNetwork = true
	disjoint(t, f.check(t, one, f.launch(t, one)), f.check(t, two, f.launch(t, two)))
	f.check(t, none, f.launch(t, none))
	if err := f.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, network := range []string{"bridge", "host"} {
		all := pod(network, gpuName, 8)
		all.HostNetwork = network == "host"
		if ids := f.check(t, all, f.launch(t, all)); len(slices.Compact(ids)) != 8 {
			t.Errorf("a pod on the network %s that asked for all GPUs has %v", network, ids)
		}
		if err := f.Remove(t.Context(), all.Name); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAPodThatAsksForTooManyIsRefused asks for one GPU more than there is.
func TestAPodThatAsksForTooManyIsRefused(t *testing.T) {
	f := setUp(t, "pcie-quad")
	f.awaitDevices(t, gpuName, f.uuids(t))
	f.refused(t, pod("greedy", gpuName, 5))
}

// TestAContainerStartedAnewKeepsItsGPUs ends the container of a pod, which the kubelet starts anew.
func TestAContainerStartedAnewKeepsItsGPUs(t *testing.T) {
	f := setUp(t, "dgx-h100")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := pod("again", gpuName, 2)
	first := f.launch(t, p)
	before := f.check(t, p, first)
	if err := f.ctr(t.Context(), "tasks", "kill", "--signal", "SIGKILL", first.Container); err != nil {
		t.Fatal(err)
	}
	s, err := f.Await(t.Context(), p.Name, "runs again", func(s PodStatus) bool { return s.Running && s.Container != first.Container })
	if err != nil {
		t.Fatal(err)
	}
	if after := f.check(t, p, s); !slices.Equal(before, after) {
		t.Errorf("the pod had %v and has %v", before, after)
	}
}
