package gpu

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAllocatables(t *testing.T) {
	mig := func(index, instanceCap int) MIGDevice {
		return MIGDevice{
			Index:              index,
			UUID:               "MIG-x",
			Profile:            "1g.10gb",
			GPUInstanceCap:     instanceCap,
			ComputeInstanceCap: 4,
		}
	}
	for name, c := range map[string]struct {
		device Device
		want   []string // label, UUID, index and problem
	}{
		"a GPU": {Device{Index: 3, UUID: "GPU-3", Minor: 5}, []string{"GPU 3", "GPU-3", "3", ""}},
		"an unreadable GPU": {
			Device{Index: 3, Minor: NoMinor, Error: "GPU is lost"},
			[]string{"GPU 3", "", "3", "cannot be read: GPU is lost"},
		},
		"a GPU without a minor number": {
			Device{Index: 3, UUID: "GPU-3", Minor: NoMinor},
			[]string{"GPU 3", "GPU-3", "3", "has a device node whose minor number is unknown"},
		},
		"a GPU in MIG mode without MIG devices": {
			Device{UUID: "GPU-0", MIGEnabled: true},
			[]string{"GPU 0", "GPU-0", "0", "is in MIG mode and has no MIG device"},
		},
		"MIG devices": {
			Device{UUID: "GPU-0", MIGEnabled: true, MIG: []MIGDevice{mig(1, 3), mig(4, NoMinor)}},
			[]string{
				"MIG device 0:1 (1g.10gb)", "MIG-x", "0:1", "",
				"MIG device 0:4 (1g.10gb)", "MIG-x", "0:4",
				"has device nodes in /dev/nvidia-caps whose minor numbers are unknown",
			},
		},
		"a MIG device of an unreadable GPU": {
			Device{UUID: "GPU-0", MIGEnabled: true, MIG: []MIGDevice{mig(1, NoMinor)}, Error: "GPU is lost"},
			[]string{"MIG device 0:1 (1g.10gb)", "MIG-x", "0:1", "cannot be read: GPU is lost"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, a := range c.device.Allocatables() {
				if a.GPU != &c.device {
					t.Errorf("%s has another GPU", a.Label())
				}
				got = append(got, a.Label(), a.UUID(), a.IndexName(), a.Reason)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
