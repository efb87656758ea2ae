package dra

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/clitest"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

var onNode = Identity{Driver: DefaultDriver, Node: "gpu-node-1"}

// stateOf returns the state of a node with a snapshot, on which all devices are healthy.
func stateOf(t testing.TB, s *gpu.Snapshot, c resource.Config) *node.State {
	t.Helper()
	c.Resource, c.MIGStrategy = "nvidia.com/gpu", resource.MIGMixed
	resources, _, err := resource.Build(s, c)
	testenv.Must(t, err)
	state := &node.State{Snapshot: s, Resources: resources, Health: map[string]health.Status{}}
	for _, r := range resources {
		for _, d := range r.Devices {
			state.Health[d.UUID] = health.Status{UUID: d.UUID, State: health.Healthy}
		}
	}
	return state
}

// machine returns the state of a simulated machine, and its PCIe roots.
func machine(t testing.TB, name string) (*node.State, map[string]string) {
	t.Helper()
	m, err := sim.LoadMachine(name)
	testenv.Must(t, err)
	roots := map[string]string{}
	for _, g := range m.GPUs {
		roots[g.Bus] = g.Upstream[0]
	}
	return stateOf(t, m.Snapshot("580.126.09"), resource.Config{}), roots
}

// text has a line for each slice, and one for each device.
func text(t testing.TB, list []Slice) string {
	t.Helper()
	var b strings.Builder
	line := func(indent string, v any) {
		data, err := json.Marshal(v)
		testenv.Must(t, err)
		fmt.Fprintf(&b, "%s%s\n", indent, data)
	}
	for _, s := range list {
		devices := s.Spec.Devices
		s.Spec.Devices = nil
		line("", s)
		for _, d := range devices {
			line("  ", d)
		}
	}
	return b.String()
}

func TestGolden(t *testing.T) {
	for _, name := range sim.Machines() {
		t.Run(name, func(t *testing.T) {
			state, roots := machine(t, name)
			list, omitted := Slices(onNode, state, roots)
			if len(omitted) > 0 {
				t.Errorf("omitted: %v", omitted)
			}
			clitest.Golden(t, filepath.Join("testdata", name+".golden"), text(t, list), *update)
		})
	}
}

// devicesIn returns the devices of all slices by name.
func devicesIn(list []Slice) map[string]Device {
	byName := map[string]Device{}
	for _, s := range list {
		for _, d := range s.Spec.Devices {
			byName[d.Name] = d
		}
	}
	return byName
}

func TestTaintsAndTheirReasons(t *testing.T) {
	since := time.Date(2026, 11, 22, 10, 0, 0, 999, time.UTC)
	rounded := since.Truncate(time.Second)
	for name, c := range map[string]struct {
		status *health.Status
		reason string // of the device itself
		want   []Taint
	}{
		"a healthy device": {&health.Status{State: health.Healthy}, "", nil},
		"an unhealthy one": {
			&health.Status{State: health.Unhealthy, Reason: "XID 95 (uncontained ECC error)", Since: since},
			"XID 95 (uncontained ECC error)",
			[]Taint{{"gpu.nvidia.com/unhealthy", "XID-95-uncontained-ECC-error", "NoSchedule", &rounded}},
		},
		"a suspect one": {
			&health.Status{State: health.Suspect, Reason: "XID 74 (NVLink error)", Since: since}, "XID 74 (NVLink error)",
			[]Taint{{"gpu.nvidia.com/suspect", "XID-74-NVLink-error", "NoSchedule", &rounded}},
		},
		"a cordoned one": {
			&health.Status{State: health.Cordoned, Reason: "cordoned: Lüfter ist laut", Since: since}, "cordoned",
			[]Taint{{"gpu.nvidia.com/cordoned", "cordoned-L-fter-ist-laut", "NoSchedule", &rounded}},
		},
		"a recovering one": {
			&health.Status{State: health.Recovering, Since: since}, "it recovers",
			[]Taint{{"gpu.nvidia.com/recovering", "", "NoSchedule", &rounded}},
		},
		"one that a pod holds under another name": {
			&health.Status{State: health.Healthy}, "default/pod (main) holds it as GPU-0::1 of nvidia.com/gpu.shared",
			[]Taint{{"gpu.nvidia.com/unavailable", "", "NoSchedule", nil}},
		},
		"one whose health is not monitored": {
			nil, "has a device node whose minor number is unknown",
			[]Taint{{"gpu.nvidia.com/unavailable", "", "NoSchedule", nil}},
		},
		"a reason that is longer than a label": {
			&health.Status{State: health.Unhealthy, Reason: strings.Repeat("a", 62) + "- b", Since: since}, "broken",
			[]Taint{{"gpu.nvidia.com/unhealthy", strings.Repeat("a", 62), "NoSchedule", &rounded}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := &resource.Device{UUID: "GPU-0", Healthy: c.reason == "", Reason: c.reason}
			states := map[string]health.Status{}
			if c.status != nil {
				states["GPU-0"] = *c.status
			}
			got := taintsOf(DefaultDriver, d, states)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// The devices of a slice stay when one of them gets a taint, after which a slice can have only half as many.
func TestSlicesAreSplitWithinTheLimits(t *testing.T) {
	for count, want := range map[int][]int{0: nil, 1: {1}, 64: {64}, 65: {64, 1}, 140: {64, 64, 12}} {
		s := &gpu.Snapshot{DriverVersion: "580.1"}
		for i := range count {
			s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: fmt.Sprintf("GPU-%08d", i)})
		}
		state := stateOf(t, s, resource.Config{})
		before, _ := Slices(onNode, state, nil)
		var got []int
		for i, slice := range before {
			got = append(got, len(slice.Spec.Devices))
			if pool := (Pool{Name: onNode.Node, SliceCount: len(before)}); slice.Spec.Pool != pool {
				t.Errorf("slice %d of %d devices has the pool %+v", i, count, slice.Spec.Pool)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d devices (-want +got)\n%s", count, diff)
		}
		for uuid := range state.Health {
			state.Health[uuid] = health.Status{UUID: uuid, State: health.Suspect}
		}
		after, _ := Slices(onNode, state, nil)
		for i := range after {
			if a, b := len(after[i].Spec.Devices), len(before[i].Spec.Devices); a != b || a > maxDevices {
				t.Errorf("slice %d of %d devices has %d with taints and %d without", i, count, a, b)
			}
		}
	}
}

func TestDevicesThatAreNotInSlices(t *testing.T) {
	s := &gpu.Snapshot{Devices: []gpu.Device{
		{Index: 0, UUID: "GPU-0"},
		{Index: 1, UUID: "GPU-1"},
		{Index: 2, UUID: "GPU-2/x"},
		{Index: 3, Minor: gpu.NoMinor, Error: "GPU is lost"},
		{Index: 4, UUID: "GPU-4", MIGEnabled: true},
		{Index: 5, UUID: "GPU-5"},
		{Index: 6, UUID: "GPU-6", MemoryBytes: 80 << 30, ComputeCapability: "8.0"},
	}}
	state := stateOf(t, s, resource.Config{
		GPUs: resource.Filter{Exclude: []resource.Selector{"5"}},
		Sharing: resource.Sharing{TimeSlicing: resource.TimeSlicing{Resources: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Devices: []resource.Selector{"0"}, Replicas: 3},
		}}, MPS: resource.MPS{Resources: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Devices: []resource.Selector{"6"}, Replicas: 2},
		}}},
	})
	list, omitted := Slices(onNode, state, nil)
	if names := slices.Sorted(maps.Keys(devicesIn(list))); !slices.Equal(names, []string{"gpu-1"}) {
		t.Errorf("devices: %v", names)
	}
	want := []string{
		"GPU 0 is not offered by DRA: its memory cannot be divided among 3 replicas",
		`GPU 2 is not offered by DRA: its UUID "GPU-2/x" makes no name`,
		"GPU 6 is not offered by DRA: it is shared by MPS, whose limits claims cannot get",
	}
	if diff := cmp.Diff(want, omitted); diff != "" {
		t.Errorf("omitted (-want +got)\n%s", diff)
	}
	if list, omitted := Slices(onNode, &node.State{Err: errors.New("no driver")}, nil); list != nil || omitted != nil {
		t.Errorf("a node that was not read: %v, %v", list, omitted)
	}
}

// Two GPUs that a claim gets because their group is the same are joined by NVLinks.
func TestNVLinkGroups(t *testing.T) {
	pair := func(a, b, links int) gpu.Link { return gpu.Link{A: a, B: b, NVLinks: links} }
	for name, c := range map[string]struct {
		gpus  int
		links []gpu.Link
		want  []string // the group of each GPU
	}{
		"no links are known": {2, nil, []string{"", ""}},
		"no NVLinks":         {2, []gpu.Link{pair(0, 1, 0)}, []string{"", ""}},
		"bridges":            {4, []gpu.Link{pair(0, 1, 4), pair(2, 3, 4)}, []string{"gpu-0", "gpu-0", "gpu-2", "gpu-2"}},
		"a chain is not joined at its ends": {
			3, []gpu.Link{pair(0, 1, 2), pair(1, 2, 2)}, []string{"gpu-0", "gpu-0", ""},
		},
		"a GPU between two that have none": {3, []gpu.Link{pair(0, 2, 2)}, []string{"gpu-0", "", "gpu-0"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &gpu.Snapshot{Links: c.links}
			for i := range c.gpus {
				s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: fmt.Sprintf("GPU-%d", i)})
			}
			groups := nvlinkGroups(s)
			var got []string
			for i := range s.Devices {
				got = append(got, groups[s.Devices[i].UUID])
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestSemver(t *testing.T) {
	for version, want := range map[string]string{
		"580.126.09": "580.126.9", "13.0": "13.0.0", "9": "9.0.0", "": "", "1.2.3.4": "", "1.x": "", "1..2": "", "-1.0": "",
	} {
		if got := semver(version); got != want {
			t.Errorf("%q: %q, want %q", version, got, want)
		}
	}
}

func TestNamesOfSlicesAreShortEnough(t *testing.T) {
	long := strings.Repeat("a.", 126) + "b"
	names := map[string]bool{}
	for _, n := range []string{"n", long, long[:252] + "c"} {
		name := Identity{Driver: DefaultDriver, Node: n}.sliceName(11)
		if len(name) > maxObject || names[name] || !strings.HasSuffix(name, "-gpu.nvidia.com-11") ||
			strings.Contains(name, ".-") {
			t.Errorf("the node %s has the slice %s", n, name)
		}
		names[name] = true
	}
}

func TestPCIeRoots(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "sys/bus/pci/devices")
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	s := &gpu.Snapshot{Devices: []gpu.Device{{}, {PCIBusID: "0000:ff:00.0"}}}
	for address, path := range map[string]string{
		"0000:1b:00.0": "../../../devices/pci0000:15/0000:15:01.0/0000:1b:00.0",
		"0000:2b:00.0": "../../../devices/platform/0000:2b:00.0",
		"0000:3b:00.0": "../../../devices/pci0000:15\n/0000:3b:00.0",
		"0000:4b:00.0": "/x",
	} {
		testenv.Must(t, os.Symlink(path, filepath.Join(dir, address)))
		s.Devices = append(s.Devices, gpu.Device{PCIBusID: address})
	}
	h, err := host.New(root, "", "")
	testenv.Must(t, err)
	if diff := cmp.Diff(map[string]string{"0000:1b:00.0": "pci0000:15"}, PCIeRoots(h, s)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
