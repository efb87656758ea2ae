package sim

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func state(t *testing.T, n *Node) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(n.Root(), stateFile))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestFaultsInTheStateFile(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{PlainNodes: true})
	for name, c := range map[string]struct {
		do   func() error
		want string
	}{
		"lost": {func() error { return n.Lose(3) }, "fault gpu=3 kind=lost\n"},
		"gone": {func() error { return n.Remove(3) }, "fault gpu=3 kind=gone\n"},
		"fails for one GPU": {
			func() error { return n.Fail("nvmlDeviceGetUUID", 2, 999) },
			"fault function=nvmlDeviceGetUUID gpu=2 return=999\n",
		},
		"fails for all": {
			func() error { return n.Fail("nvmlInit_v2", AnyGPU, 9) },
			"fault function=nvmlInit_v2 return=9\n",
		},
		"hangs":   {func() error { return n.Hang(AnyFunction, AnyGPU) }, "fault function=* hang=1\n"},
		"latency": {func() error { return n.SetLatency(50 * time.Microsecond) }, "latency ns=50000\n"},
		"the kernel's version": {
			func() error { return n.SetKernelVersion("575.57.08") },
			"machine kernel=575.57.08\n",
		},
		"a second kind for a GPU": {func() error { return first(n.Lose(1), n.Remove(1)) }, "fault gpu=1 kind=gone\n"},
		"a second latency":        {func() error { return first(n.SetLatency(1), n.SetLatency(2)) }, "latency ns=2\n"},
		"no latency":              {func() error { return first(n.SetLatency(1), n.SetLatency(0)) }, ""},
		"another return value": {
			func() error { return first(n.Fail("nvmlA", 1, 1), n.Fail("nvmlA", 1, 2)) },
			"fault function=nvmlA gpu=1 return=2\n",
		},
		"the same for another GPU": {
			func() error { return first(n.Hang("nvmlA", 1), n.Hang("nvmlA", AnyGPU)) },
			"fault function=nvmlA gpu=1 hang=1\nfault function=nvmlA hang=1\n",
		},
		"two, one GPU cleared": {
			func() error { return first(n.Lose(1), n.Lose(2), n.ClearGPU(1)) },
			"fault gpu=2 kind=lost\n",
		},
		"all cleared": {func() error {
			return first(n.Lose(1), n.SetKernelVersion("575.57.08"), n.Clear())
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.do(); err != nil {
				t.Fatal(err)
			}
			if got := state(t, n); got != c.want {
				t.Errorf("state is %q, want %q", got, c.want)
			}
			if err := n.Clear(); err != nil {
				t.Fatal(err)
			}
			version := must(os.ReadFile(filepath.Join(n.Root(), "sys/module/nvidia/version")))
			if string(version) != DefaultDriver+"\n" {
				t.Errorf("after Clear the kernel module is %q", version)
			}
		})
	}
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func TestInvalidFaultsChangeNothing(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{PlainNodes: true})
	quad := makeNode(t, "pcie-quad", Options{PlainNodes: true})
	for name, err := range map[string]error{
		"a GPU behind the last":        n.Lose(8),
		"a negative GPU":               n.Remove(-1),
		"a GPU to clear":               n.ClearGPU(8),
		"a GPU to partition":           n.SetMIG(8, nil),
		"a GPU of a failing call":      n.Fail("nvmlInit", -2, 1),
		"a function of another kind":   n.Hang("cuInit", AnyGPU),
		"a function with a line break": n.Hang("nvmlInit\nfault", AnyGPU),
		"a return value out of range":  n.Fail("nvmlInit", AnyGPU, 1000),
		"a negative latency":           n.SetLatency(-1),
		"a latency over a minute":      n.SetLatency(time.Hour),
		"a version that is none":       n.SetKernelVersion("580 x"),
		"a MIG profile":                n.SetMIG(0, []string{"1g.5gb"}),
		"MIG of a GPU without MIG":     quad.SetMIG(0, nil),
		"no MIG, GPU without MIG":      quad.DisableMIG(0),
	} {
		if !isInvalid(err) {
			t.Errorf("%s: the error is %v, want an InvalidError", name, err)
		}
	}
	if got := state(t, n) + state(t, quad); got != "" {
		t.Errorf("invalid faults changed the state to %q", got)
	}
}

// TestMIGChanges checks that a MIG change reaches the library, the state, the device nodes and /proc.
func TestMIGChanges(t *testing.T) {
	n := makeNode(t, "mig-h100", Options{})
	before := tree(t, n.Root())
	checkList(t, n)
	if err := n.SetMIG(1, []string{"1c.3g.40gb", "1g.10gb"}); err != nil {
		t.Fatal(err)
	}
	checkList(t, n)
	after := tree(t, n.Root())
	// GPU 1 has minor 2: its GPU instance 1 remains, 2 is removed, 11 is new. Those of other GPUs do not change.
	for path, there := range map[string]bool{
		"dev/nvidia-caps/nvidia-cap282":                            true,  // gpu2/gi1
		"dev/nvidia-caps/nvidia-cap284":                            false, // its second compute instance
		"dev/nvidia-caps/nvidia-cap291":                            false, // gpu2/gi2
		"dev/nvidia-caps/nvidia-cap345":                            false, // gpu2/gi8
		"dev/nvidia-caps/nvidia-cap372":                            true,  // gpu2/gi11
		"proc/driver/nvidia/capabilities/gpu2/mig/gi11/access":     true,
		"proc/driver/nvidia/capabilities/gpu2/mig/gi11/ci0/access": true,
		"proc/driver/nvidia/capabilities/gpu2/mig/gi1/ci1/access":  false,
		"proc/driver/nvidia/capabilities/gpu2/mig/gi2/ci0/access":  false,
	} {
		if _, ok := after[path]; ok != there {
			t.Errorf("%s exists: %v, want %v", path, ok, there)
		}
	}
	s := must(n.Snapshot())
	checkCaps(t, s, after)
	if err := first(n.DisableMIG(0), n.SetMIG(2, nil), n.SetMIG(6, []string{"7g.80gb"})); err != nil {
		t.Fatal(err)
	}
	checkList(t, n)
	s = must(n.Snapshot())
	checkCaps(t, s, tree(t, n.Root()))
	for index, want := range map[int]bool{0: false, 2: true, 6: true, 7: false} {
		if s.Devices[index].MIGEnabled != want {
			t.Errorf("GPU %d: MIG is on: %v, want %v", index, s.Devices[index].MIGEnabled, want)
		}
	}
	if err := n.ClearGPU(6); err != nil {
		t.Fatal(err)
	}
	if err := n.Clear(); err != nil {
		t.Fatal(err)
	}
	checkList(t, n)
	restored := tree(t, n.Root())
	delete(restored, ownDir+"/lock")
	if diff := cmp.Diff(before, restored); diff != "" {
		t.Errorf("after Clear (-before +after):\n%s", diff)
	}
}

// checkCaps compares the nodes in /dev/nvidia-caps with the MIG devices.
func checkCaps(t *testing.T, s *gpu.Snapshot, files map[string]string) {
	t.Helper()
	want := []string{capPath(capConfig), capPath(capMonitor)}
	for _, d := range s.Devices {
		for _, m := range d.MIG {
			want = append(want, capPath(m.GPUInstanceCap), capPath(m.ComputeInstanceCap))
		}
	}
	slices.Sort(want)
	var got []string
	for path := range files {
		if strings.HasPrefix(path, "dev/nvidia-caps/") {
			got = append(got, path)
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(slices.Compact(want), got); diff != "" {
		t.Errorf("nodes in /dev/nvidia-caps (-want +got):\n%s", diff)
	}
}

func TestSnapshotWithoutAGPU(t *testing.T) {
	n := makeNode(t, "dgx1-v100", Options{PlainNodes: true})
	if err := first(n.Remove(0), n.Remove(5)); err != nil {
		t.Fatal(err)
	}
	checkList(t, n)
	s := must(n.Snapshot())
	if len(s.Devices) != 6 || len(s.Links) != 15 {
		t.Fatalf("%d devices and %d links, want 6 and 15", len(s.Devices), len(s.Links))
	}
	// Indices 3 to 7 are now 2 to 5.
	if l, ok := s.Link(2, 5); !ok || l.NVLinks != 1 {
		t.Errorf("link of GPU 2 and 5 is %+v, want one NVLink", l)
	}
}
