package kubelet

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim/simtest"
)

// profiles are the UUIDs of the machine's MIG devices by their profile.
func (f *fixture) profiles(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, d := range f.snapshot(t).Devices {
		for _, m := range d.MIG {
			all[m.Profile] = append(all[m.Profile], m.UUID)
		}
	}
	return all
}

// TestMIGDevices gives a pod a MIG device of each profile, and one a whole GPU beside them; then a GPU is partitioned
// anew while the plugin runs.
func TestMIGDevices(t *testing.T) {
	f := setUp(t, "mig-h100", "--mig-strategy=mixed")
	profiles := f.profiles(t)
	if len(profiles) == 0 {
		t.Fatal("the machine has no MIG devices")
	}
	var lists [][]string
	for _, profile := range slices.Sorted(maps.Keys(profiles)) {
		// A resource's name cannot have a plus sign.
		name := "nvidia.com/mig-" + strings.ReplaceAll(profile, "+", ".")
		f.awaitDevices(t, name, profiles[profile])
		p := pod("mig", name, 1)
		lists = append(lists, f.check(t, p, f.launch(t, p)))
	}
	disjoint(t, lists...)
}

// TestAGPUIsPartitionedAnew changes the MIG devices of a GPU while the plugin runs: what is offered changes, and a pod
// on another GPU keeps what it has.
func TestAGPUIsPartitionedAnew(t *testing.T) {
	f := setUp(t, "mig-h100", "--mig-strategy=mixed")
	const small, large = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
	f.awaitDevices(t, small, f.profiles(t)["1g.10gb"])
	var first, second int // GPUs with small devices; the second is partitioned anew
	for _, d := range f.snapshot(t).Devices {
		if len(d.MIG) > 0 && d.MIGEnabled {
			first, second = second, d.Index
		}
	}
	if err := errors.Join(f.gpus.SetMIG(first, []string{"1g.10gb"}), f.gpus.SetMIG(second, []string{"1g.10gb"})); err != nil {
		t.Fatal(err)
	}
	f.reconcile(t)
	f.awaitDevices(t, small, f.profiles(t)["1g.10gb"])
	p := pod("steady", small, 1)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	changed := second
	if slices.ContainsFunc(f.snapshot(t).Devices[second].MIG, func(m gpu.MIGDevice) bool { return m.UUID == ids[0] }) {
		changed = first
	}
	if err := f.gpus.SetMIG(changed, []string{"3g.40gb", "3g.40gb"}); err != nil {
		t.Fatal(err)
	}
	f.reconcile(t)
	f.awaitDevices(t, large, f.profiles(t)["3g.40gb"])
	f.awaitDevices(t, small, f.profiles(t)["1g.10gb"])
	f.checkSteady(t, p, s, ids)
	both := pod("both", large, 2)
	f.check(t, both, f.launch(t, both))
}

// TestMIGDevicesArePackedOnTheFullestGPU has a device of the profile 1g.10gb on three GPUs. That of which a pod has four
// compute slices, as another profile, is the fullest.
func TestMIGDevicesArePackedOnTheFullestGPU(t *testing.T) {
	f := setUp(t, "mig-h100", config(t, "{mig-strategy: mixed, allocation: {shared-policy: pack}}"))
	const small, large = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-4g.40gb"
	f.awaitDevices(t, small, f.profiles(t)["1g.10gb"])
	f.awaitDevices(t, large, f.profiles(t)["4g.40gb"])
	first := pod("large", large, 1)
	f.check(t, first, f.launch(t, first))
	second := pod("small", small, 1)
	given := f.check(t, second, f.launch(t, second))
	full := f.snapshot(t).Devices[5]
	if !slices.ContainsFunc(full.MIG, func(m gpu.MIGDevice) bool { return m.UUID == given[0] }) {
		t.Errorf("the pod was given %s, which is not on GPU 5 (%v)", given, full.MIG)
	}
}

// TestMIGDevicesAsGPUs has the strategy single: who asks for a GPU gets a MIG device. As soon as the devices are not all
// alike, none is to be had.
func TestMIGDevicesAsGPUs(t *testing.T) {
	f := setUp(t, "mig-h100", "--mig-strategy=single")
	all := len(f.snapshot(t).Devices)
	for i := range all {
		f.setMIG(t, i, "1g.20gb", "1g.20gb", "1g.20gb")
	}
	f.awaitDevices(t, gpuName, f.profiles(t)["1g.20gb"])
	one, five := pod("one", gpuName, 1), pod("five", gpuName, 5)
	s := f.launch(t, one)
	ids := f.check(t, one, s)
	disjoint(t, ids, f.check(t, five, f.launch(t, five)))
	if seen := f.seen(t, s); len(seen) != 2 || !slices.ContainsFunc(seen, func(uuid string) bool { return strings.HasPrefix(uuid, "MIG-") }) {
		t.Errorf("the pod that asked for one sees %v, want a MIG device and the GPU that it is on", seen)
	}

	free := f.unused(t, all)
	f.setMIG(t, free, "3g.40gb")
	f.reconcile(t)
	f.awaitDevices(t, gpuName, nil)
	f.refused(t, pod("late", gpuName, 1))
	f.checkSteady(t, one, s, ids)
	f.setMIG(t, free, "1g.20gb")
	f.reconcile(t)
	f.awaitDevices(t, gpuName, f.profiles(t)["1g.20gb"])
	f.checkSteady(t, one, s, ids)
}

// TestMIGModeWithoutDevices has all GPUs in MIG mode and no MIG device, and then makes some. The plugin is the same.
func TestMIGModeWithoutDevices(t *testing.T) {
	gpus := simtest.Node(t, "mig-h100")
	for i := range gpus.Machine().GPUs {
		if err := gpus.SetMIG(i, nil); err != nil {
			t.Fatal(err)
		}
	}
	f := setUpOn(t, gpus, "--mig-strategy=mixed")
	const said = "is in MIG mode and has no MIG device"
	err := wait(t.Context(), 30*time.Second, "the plugin has seen the GPUs", func() error {
		if n := strings.Count(f.plugin.Log(), said); n < len(gpus.Machine().GPUs) {
			return fmt.Errorf("it has said of %d that each %s", n, said)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	f.setMIG(t, 0, "2g.20gb", "2g.20gb")
	f.reconcile(t)
	f.awaitDevices(t, "nvidia.com/mig-2g.20gb", f.profiles(t)["2g.20gb"])
	p := pod("first", "nvidia.com/mig-2g.20gb", 1)
	f.check(t, p, f.launch(t, p))
}

func (f *fixture) setMIG(t *testing.T, gpu int, profiles ...string) {
	t.Helper()
	if err := f.gpus.SetMIG(gpu, profiles); err != nil {
		t.Fatal(err)
	}
}

// unused is the index of a GPU of which no pod has a device.
func (f *fixture) unused(t *testing.T, count int) int {
	t.Helper()
	pods, err := f.Assigned(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var given []string
	for _, devices := range pods {
		given = append(given, f.visible(t, slices.Concat(slices.Collect(maps.Values(devices))...))...)
	}
	for i, d := range f.snapshot(t).Devices[:count] {
		if !slices.Contains(given, d.UUID) {
			return i
		}
	}
	t.Fatal("pods have devices of all GPUs")
	return 0
}
