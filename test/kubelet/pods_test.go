package kubelet

import (
	"slices"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
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
	testenv.Must(t, f.RemovePods(t.Context()))
	for _, network := range []string{"bridge", "host"} {
		all := newPod(network, gpuName, 8)
		all.HostNetwork = network == "host"
		if ids := f.check(t, all, f.launch(t, all)); len(slices.Compact(ids)) != 8 {
			t.Errorf("a pod on the network %s that requested all GPUs has %v", network, ids)
		}
		testenv.Must(t, f.Remove(t.Context(), all.Name))
	}
}
