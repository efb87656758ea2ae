package kubelet

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/gpu"
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

// TestMIGReconfiguration changes the MIG devices of a GPU while the plugin runs. The advertised devices change; a pod
// on another GPU keeps its device.
func TestMIGReconfiguration(t *testing.T) {
	f := setUp(t, "mig-h100", "--mig-strategy=mixed")
	const small, large = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
	f.awaitDevices(t, small, f.migByProfile(t)["1g.10gb"])
	var first, second int // GPUs with small devices
	for _, d := range f.snapshot(t).Devices {
		if len(d.MIG) > 0 && d.MIGEnabled {
			first, second = second, d.Index
		}
	}
	f.setMIG(t, first, "1g.10gb")
	f.setMIG(t, second, "1g.10gb")
	f.reconcile(t)
	f.awaitDevices(t, small, f.migByProfile(t)["1g.10gb"])
	p := newPod("steady", small, 1)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	changed := second
	if slices.ContainsFunc(f.snapshot(t).Devices[second].MIG, func(m gpu.MIGDevice) bool { return m.UUID == ids[0] }) {
		changed = first
	}
	f.setMIG(t, changed, "3g.40gb", "3g.40gb")
	f.reconcile(t)
	f.awaitDevices(t, large, f.migByProfile(t)["3g.40gb"])
	f.awaitDevices(t, small, f.migByProfile(t)["1g.10gb"])
	f.checkUnchanged(t, p, s, ids)
	both := newPod("both", large, 2)
	f.check(t, both, f.launch(t, both))
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
	if err := f.gpus.SetMIG(gpu, profiles); err != nil {
		t.Fatal(err)
	}
}

// findUnusedGPU returns the index of a GPU of which no pod has a device.
func (f *fixture) findUnusedGPU(t *testing.T, count int) int {
	t.Helper()
	pods, err := f.Assigned(t.Context())
	if err != nil {
		t.Fatal(err)
	}
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
