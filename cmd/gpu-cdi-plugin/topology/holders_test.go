package topology

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
)

func TestContainersHoldDevicesByThePluginAndByClaims(t *testing.T) {
	by := func(devices ...string) podresources.Claim {
		return podresources.Claim{Devices: map[string][]string{"gpu.nvidia.com": devices}}
	}
	n := Node{
		Snapshot: &gpu.Snapshot{Devices: []gpu.Device{
			{Index: 0, UUID: "GPU-A"},
			{Index: 1, UUID: "GPU-B", MIG: []gpu.MIGDevice{{UUID: "MIG-C"}}},
		}},
		Holders: []podresources.Holder{
			{Pod: "plugin", Devices: []string{"GPU-A::1", "eth0"}},
			{Pod: "claims", Claims: []podresources.Claim{
				by("eth1", "gpu-b"), by("mig-c"), {Devices: map[string][]string{"gpu.example.com": {"gpu-a"}}},
			}},
			{Pod: "gone", Devices: []string{"GPU-Z"}, Claims: []podresources.Claim{by("gpu-z")}},
		},
	}
	got := map[string][]string{}
	for _, h := range n.DeviceHolders() {
		got[h.Pod] = h.Devices
	}
	if diff := cmp.Diff(map[string][]string{"plugin": {"GPU-A::1"}, "claims": {"GPU-B", "MIG-C"}}, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
