package kubelet

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// migByProfile returns the UUIDs of the machine's MIG devices by profile.
func (f *fixture) migByProfile(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, d := range f.snapshot(t).Devices {
		for _, m := range d.MIG {
			all[m.Profile] = append(all[m.Profile], m.UUID)
		}
	}
	return all
}

// TestMIGDevices runs a pod with a MIG device of each profile.
func TestMIGDevices(t *testing.T) {
	f := setUp(t, "mig-h100", "--mig-strategy=mixed")
	profiles := f.migByProfile(t)
	if len(profiles) == 0 {
		t.Fatal("the machine has no MIG devices")
	}
	var lists [][]string
	for _, profile := range slices.Sorted(maps.Keys(profiles)) {
		// The name of a resource cannot contain a plus sign.
		name := "nvidia.com/mig-" + strings.ReplaceAll(profile, "+", ".")
		f.awaitDevices(t, name, profiles[profile])
		p := newPod("mig", name, 1)
		lists = append(lists, f.check(t, p, f.launch(t, p)))
	}
	checkDisjoint(t, lists...)
}

// TestMIGStrategySingle requests GPUs and gets MIG devices. While they are not all of one profile, none is advertised.
func TestMIGStrategySingle(t *testing.T) {
	f := setUp(t, "mig-h100", "--mig-strategy=single")
	all := len(f.snapshot(t).Devices)
	for i := range all {
		f.setMIG(t, i, "1g.20gb", "1g.20gb", "1g.20gb")
	}
	f.awaitDevices(t, gpuName, f.migByProfile(t)["1g.20gb"])
	one, five := newPod("one", gpuName, 1), newPod("five", gpuName, 5)
	s := f.launch(t, one)
	ids := f.check(t, one, s)
	checkDisjoint(t, ids, f.check(t, five, f.launch(t, five)))
	isMIG := func(uuid string) bool { return strings.HasPrefix(uuid, "MIG-") }
	if seen := f.listGPUs(t, s); len(seen) != 2 || !slices.ContainsFunc(seen, isMIG) {
		t.Errorf("the pod that requested one sees %v, want a MIG device and its GPU", seen)
	}

	free := f.findUnusedGPU(t, all)
	f.setMIG(t, free, "3g.40gb")
	f.reconcile(t)
	f.awaitDevices(t, gpuName, nil)
	f.expectRefusal(t, newPod("late", gpuName, 1))
	f.checkUnchanged(t, one, s, ids)
	f.setMIG(t, free, "1g.20gb")
	f.reconcile(t)
	f.awaitDevices(t, gpuName, f.migByProfile(t)["1g.20gb"])
	f.checkUnchanged(t, one, s, ids)
}

func (f *fixture) setMIG(t *testing.T, gpu int, profiles ...string) {
	t.Helper()
	testenv.Must(t, f.gpus.SetMIG(gpu, profiles))
}

// findUnusedGPU returns the index of a GPU of which no pod has a device.
func (f *fixture) findUnusedGPU(t *testing.T, count int) int {
	t.Helper()
	pods, err := f.Assigned(t.Context())
	testenv.Must(t, err)
	var given []string
	for _, devices := range pods {
		given = append(given, f.addParents(t, slices.Concat(slices.Collect(maps.Values(devices))...))...)
	}
	for i, d := range f.snapshot(t).Devices[:count] {
		if !slices.Contains(given, d.UUID) {
			return i
		}
	}
	t.Fatal("pods have devices of all GPUs")
	return 0
}
