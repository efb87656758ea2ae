package cdi

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
)

func TestValidateDevices(t *testing.T) {
	t.Parallel()
	node := &gpu.Snapshot{Devices: []gpu.Device{
		{Index: 0, UUID: "GPU-whole"},
		{Index: 1, UUID: "GPU-split", MIGEnabled: true, MIG: []gpu.MIGDevice{{UUID: "MIG-part"}}},
		{Index: 2, UUID: "GPU-broken", Error: "it is lost"},
	}}
	for name, c := range map[string]struct {
		device string
		want   []Problem
	}{
		"a GPU that is there":              {"GPU-whole", nil},
		"a MIG device that is there":       {"MIG-part", nil},
		"an index, which is no GPU's name": {"7", nil},
		"a GPU that is gone":               {"GPU-gone", []Problem{{"device GPU-gone", "the driver has no such device"}}},
		"a MIG device that is gone":        {"MIG-gone", []Problem{{"device MIG-gone", "the driver has no such device"}}},
		"a GPU that is in MIG mode now": {"GPU-split", []Problem{
			{"device GPU-split", "the GPU is in MIG mode: only its MIG devices can be used"},
		}},
		"a GPU that cannot be read": {"GPU-broken", []Problem{{"device GPU-broken", "the GPU cannot be read: it is lost"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec := &specs.Spec{Devices: []specs.Device{{Name: c.device}}}
			if diff := cmp.Diff(c.want, ValidateDevices(spec, node)); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			if got, want := NamesGPUs(spec), c.device != "7"; got != want {
				t.Errorf("NamesGPUs = %t, want %t", got, want)
			}
		})
	}
}
