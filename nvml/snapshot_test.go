package nvml

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func TestUnreadableGPUsHaveTheirLastNames(t *testing.T) {
	readable := func(index int, uuid, address string) gpu.Device {
		return gpu.Device{Index: index, UUID: uuid, PCIBusID: address, Name: "A", MemoryBytes: 1}
	}
	lost := func(index int, uuid, address string) gpu.Device {
		return gpu.Device{Index: index, UUID: uuid, PCIBusID: address, Minor: gpu.NoMinor, Error: "lost"}
	}
	named := func(index int, uuid, address string) gpu.Device {
		d := readable(index, uuid, address)
		d.Error = "lost"
		return d
	}
	before := []gpu.Device{readable(0, "GPU-a", "0000:01:00.0"), readable(1, "GPU-b", "0000:02:00.0")}
	for name, c := range map[string]struct{ before, now, want []gpu.Device }{
		"in the first snapshot": {nil, []gpu.Device{lost(0, "", "")}, []gpu.Device{lost(0, "", "")}},
		"by UUID": {
			before,
			[]gpu.Device{lost(0, "GPU-b", ""), before[0]},
			[]gpu.Device{named(0, "GPU-b", "0000:02:00.0"), before[0]},
		},
		"by PCI address": {
			before, []gpu.Device{lost(0, "", "0000:02:00.0")}, []gpu.Device{named(0, "GPU-b", "0000:02:00.0")},
		},
		"by index": {
			before,
			[]gpu.Device{before[0], lost(1, "", "")},
			[]gpu.Device{before[0], named(1, "GPU-b", "0000:02:00.0")},
		},
		"not by index if another GPU has that UUID": {
			before,
			[]gpu.Device{lost(0, "", ""), readable(1, "GPU-a", "0000:01:00.0")},
			[]gpu.Device{lost(0, "", ""), readable(1, "GPU-a", "0000:01:00.0")},
		},
		"of a GPU that was not there": {
			before, []gpu.Device{lost(0, "GPU-c", "0000:01:00.0")}, []gpu.Device{lost(0, "GPU-c", "0000:01:00.0")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var last *gpu.Snapshot
			if c.before != nil {
				last = &gpu.Snapshot{Devices: c.before}
			}
			now := &gpu.Snapshot{Devices: c.now}
			nameUnreadable(now, last)
			if diff := cmp.Diff(c.want, now.Devices); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
