package devicemanager

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Without a preference the device manager takes any GPUs of a NUMA node. In each half of a DGX-1 only one pair has two
// NVLinks and one PCIe switch: 2 and 3, and 6 and 7.
func TestContainersGetThePreferredGPUs(t *testing.T) {
	machine, err := sim.LoadMachine("dgx1-v100")
	testenv.Must(t, err)
	snapshot := machine.Snapshot(sim.DefaultDriver)
	node, err := allocator.NewGPUs(snapshot, allocator.DefaultWeights())
	testenv.Must(t, err)
	c := resource.Config{Resource: gpuName, MIGStrategy: resource.MIGNone}
	list, _, err := resource.Build(snapshot, c)
	testenv.Must(t, err)
	k := newKubelet(t)
	servePreferring(t, k, node, list)
	k.awaitCounts(t, 8, 8)
	var want [][]string
	for _, pair := range [][]int{{2, 3}, {0, 1}, {6, 7}, {4, 5}} {
		var names []string
		for _, g := range pair {
			names = append(names, gpuName+"="+list[0].Devices[g].UUID)
		}
		slices.Sort(names)
		want = append(want, names)
	}
	for round := range 5 { // a random choice would pass about one round in ten
		k.pods = nil // those of the last round have ended
		var got [][]string
		for pod := range want {
			got = append(got, k.admit(t, fmt.Sprintf("pod-%d-%d", round, pod), 2))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("CDI devices of pods with two GPUs (-want +got):\n%s", diff)
		}
	}
}
