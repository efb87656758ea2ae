package mps

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/resource"
)

func TestDaemons(t *testing.T) {
	limits := &resource.MPSLimits{MemoryBytes: 1 << 30, ThreadPercent: 50}
	got := Daemons([]resource.Resource{
		{
			Name: "b",
			Devices: []resource.Device{
				{UUID: "GPU-2", MPS: limits, Healthy: true},
				{UUID: "GPU-2", MPS: limits, Healthy: true},
			},
		},
		{
			Name:    "a",
			Devices: []resource.Device{{UUID: "GPU-3", Healthy: true}, {UUID: "GPU-1", MPS: limits, Reason: "lost"}},
		},
	})
	want := []Daemon{{UUID: "GPU-1", Limits: *limits, Hold: true}, {UUID: "GPU-2", Limits: *limits}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestReason(t *testing.T) {
	half, third := resource.MPSLimits{MemoryBytes: 2 << 20}, resource.MPSLimits{MemoryBytes: 1 << 20}
	s := New(Options{})
	s.workers["GPU-1"] = &worker{ready: half}
	s.workers["GPU-2"] = &worker{reason: "it is gone"}
	s.workers["GPU-4"] = &worker{occupied: true}
	const occupied = "its GPU is still shared by MPS until the last client has ended"
	for name, c := range map[string]struct {
		device resource.Device
		want   string
	}{
		"a GPU that is not shared": {resource.Device{UUID: "GPU-0", Parent: "GPU-0"}, ""},
		"a daemon that is ready":   {resource.Device{UUID: "GPU-1", Parent: "GPU-1", MPS: &half}, ""},
		"a daemon with other limits": {
			resource.Device{UUID: "GPU-1", Parent: "GPU-1", MPS: &third},
			"the limits of its MPS control daemon are being changed",
		},
		"a daemon with a problem": {resource.Device{UUID: "GPU-2", Parent: "GPU-2", MPS: &half}, "it is gone"},
		"a GPU whose daemon is new": {
			resource.Device{UUID: "GPU-3", Parent: "GPU-3", MPS: &half}, starting,
		},
		"a GPU that is no longer shared":        {resource.Device{UUID: "GPU-4", Parent: "GPU-4"}, occupied},
		"a MIG device of a GPU that was shared": {resource.Device{UUID: "MIG-1", Parent: "GPU-4"}, occupied},
	} {
		if got := s.Reason(&c.device); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
