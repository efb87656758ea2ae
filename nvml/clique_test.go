package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestClique(t *testing.T) {
	const completed = nvml.GPU_FABRIC_STATE_COMPLETED
	uuid := [16]uint8{0x0f, 0x2a, 0x3b, 0x4c, 4: 0x40, 6: 0x80, 15: 0xcd}
	for name, c := range map[string]struct {
		info nvml.GpuFabricInfo
		want string
	}{
		"a fabric of several hosts": {
			nvml.GpuFabricInfo{ClusterUuid: uuid, CliqueId: 7, State: completed}, "0f2a3b4c-4000-8000-0000-0000000000cd.7",
		},
		"the fabric of a single host": {nvml.GpuFabricInfo{State: completed}, ""},
		"a GPU that has not yet joined": {
			nvml.GpuFabricInfo{ClusterUuid: uuid, State: nvml.GPU_FABRIC_STATE_IN_PROGRESS}, "",
		},
		"a GPU that could not join": {
			nvml.GpuFabricInfo{ClusterUuid: uuid, State: completed, Status: uint32(nvml.ERROR_UNKNOWN)}, "",
		},
		"a driver that does not know it": {nvml.GpuFabricInfo{}, ""},
	} {
		if got := clique(c.info); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
