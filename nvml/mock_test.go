package nvml

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	mockserver "github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

// NVIDIA's own mock of a DGX A100 is a second implementation of NVML. Here it also answers as drivers do that the
// simulated library does not simulate.

// openMock returns a session that has opened the mock. What the mock lacks is filled in: PCI addresses and twelve links
// to switches.
func openMock(t testing.TB) (*Session, *mockserver.Server) {
	t.Helper()
	server := dgxa100.New()
	for i, d := range server.Devices {
		fillMock(d.(*mockserver.Device), i)
	}
	session := NewSession(Options{})
	session.library = &library{api: server, has: func(string) bool { return true }, initialised: true}
	session.loaded = session.library
	return session, server
}

func fillMock(d *mockserver.Device, i int) {
	d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) {
		return nvml.PciInfo{BusId: pciAddress(fmt.Sprintf("00000000:%02X:00.0", 0x10+i))}, nvml.SUCCESS
	}
	d.GetNvLinkStateFunc = func(port int) (nvml.EnableState, nvml.Return) {
		if port >= 12 {
			return 0, nvml.ERROR_INVALID_ARGUMENT
		}
		return nvml.FEATURE_ENABLED, nvml.SUCCESS
	}
	d.GetNvLinkRemotePciInfoFunc = func(port int) (nvml.PciInfo, nvml.Return) {
		return nvml.PciInfo{BusId: pciAddress(fmt.Sprintf("00000000:C%X:00.0", port%6))}, nvml.SUCCESS
	}
	d.GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
		return nvml.NVLINK_DEVICE_TYPE_SWITCH, nvml.SUCCESS
	}
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		return nvml.GpuFabricInfo{
			ClusterUuid: [16]uint8{15: 0xab}, CliqueId: 7, State: nvml.GPU_FABRIC_STATE_COMPLETED,
		}, nvml.SUCCESS
	}
	d.GetTopologyCommonAncestorFunc = func(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
		if other.(*mockserver.Device).Index/4 == i/4 {
			return nvml.TOPOLOGY_NODE, nvml.SUCCESS
		}
		return nvml.TOPOLOGY_SYSTEM, nvml.SUCCESS
	}
}

func pciAddress(s string) (chars [32]int8) {
	for i := range s {
		chars[i] = int8(s[i])
	}
	return chars
}

func device(server *mockserver.Server, i int) *mockserver.Device {
	return server.Devices[i].(*mockserver.Device)
}

func TestMock(t *testing.T) {
	session, server := openMock(t)
	got := readTopology(t, session, createHost(t, map[string]string{"sys/bus/pci/devices/0000:17:00.0/numa_node": "3"}))
	if got.DriverVersion != "550.54.15" || got.CUDAVersion != "12.4" || len(got.Devices) != 8 {
		t.Errorf("driver %q, CUDA %q, %d devices", got.DriverVersion, got.CUDAVersion, len(got.Devices))
	}
	want := gpu.Device{
		Index: 7, UUID: device(server, 7).UUID, Name: device(server, 7).Config.Name, Minor: 7, PCIBusID: "0000:17:00.0",
		NUMANode: 3, MemoryBytes: 40 << 30, ComputeCapability: "8.0", MIGCapable: true, MIG: []gpu.MIGDevice{},
		FabricClique: "00000000-0000-0000-0000-0000000000ab.7",
	}
	if diff := cmp.Diff(want, got.Devices[7]); diff != "" {
		t.Errorf("GPU 7 (-want +got):\n%s", diff)
	}
	link, _ := got.Link(3, 4)
	if diff := cmp.Diff(gpu.Link{A: 3, B: 4, PCIe: gpu.PathSystem, NVLinks: 12, Switched: true}, link); diff != "" {
		t.Errorf("link 3 to 4 (-want +got):\n%s", diff)
	}
}

// Some drivers answer in ways that are neither the usual answer nor a failure of the GPU.
func TestMockAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		change func(d *mockserver.Device)
		check  func(s *gpu.Snapshot) bool
	}{
		"no NVLink": {
			func(d *mockserver.Device) {
				d.GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
			},
			func(s *gpu.Snapshot) bool {
				return s.Devices[2].Usable() && countLinks(s, 1, 2) == 0 && countLinks(s, 0, 1) == 12
			},
		},
		"one NVLink down, one not wired": {
			func(d *mockserver.Device) {
				up := d.GetNvLinkStateFunc
				d.GetNvLinkStateFunc = func(port int) (nvml.EnableState, nvml.Return) {
					switch port {
					case 3:
						return nvml.FEATURE_DISABLED, nvml.SUCCESS
					case 5:
						return 0, nvml.ERROR_NOT_SUPPORTED
					}
					return up(port)
				}
			},
			func(s *gpu.Snapshot) bool {
				return countLinks(s, 1, 2) == 10 && countLinks(s, 2, 7) == 10 && countLinks(s, 0, 1) == 12
			},
		},
		"NVSwitches without addresses": {
			func(d *mockserver.Device) {
				d.GetNvLinkRemotePciInfoFunc = func(int) (nvml.PciInfo, nvml.Return) {
					return nvml.PciInfo{}, nvml.ERROR_NOT_SUPPORTED
				}
			},
			func(s *gpu.Snapshot) bool { return countLinks(s, 1, 2) == 12 },
		},
		"a driver that does not know what links lead to": {
			func(d *mockserver.Device) {
				d.GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
					return 0, nvml.ERROR_FUNCTION_NOT_FOUND
				}
			},
			func(s *gpu.Snapshot) bool { return s.Devices[2].Usable() && countLinks(s, 1, 2) == 0 },
		},
		"a topology that a hypervisor hides": {
			func(d *mockserver.Device) {
				d.GetTopologyCommonAncestorFunc = func(nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
					return 0, nvml.ERROR_NOT_SUPPORTED
				}
			},
			func(s *gpu.Snapshot) bool {
				l, ok := s.Link(2, 3)
				return ok && l.PCIe == gpu.PathUnknown && l.NVLinks == 12
			},
		},
		"a PCI address that is none": {
			func(d *mockserver.Device) {
				d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) {
					return nvml.PciInfo{BusId: pciAddress("?")}, nvml.SUCCESS
				}
			},
			func(s *gpu.Snapshot) bool { return strings.HasPrefix(s.Devices[2].Error, "nvmlDeviceGetPciInfo: ") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			session, server := openMock(t)
			c.change(device(server, 2))
			if s := readTopology(t, session, createHost(t, nil)); !c.check(s) {
				t.Errorf("GPU 2 is %+v, its links are %+v", s.Devices[2], s.Links)
			}
		})
	}
}

// The library of an old driver has only the functions that are required; no other is called.
func TestMockOfAnOldDriver(t *testing.T) {
	session, _ := openMock(t)
	session.library.has = func(function string) bool { return slices.Contains(requiredFunctions(), function) }
	s := readTopology(t, session, createHost(t, nil))
	if len(s.Links) != 28 {
		t.Errorf("%d links, want 28", len(s.Links))
	}
	for _, d := range s.Devices {
		if !d.Usable() || d.Name != "" || d.MemoryBytes != 0 {
			t.Errorf("got %+v, want a usable GPU of which little is known", d)
		}
	}
}

func countLinks(s *gpu.Snapshot, a, b int) int {
	l, _ := s.Link(a, b)
	return l.NVLinks
}

// A MIG device whose name has no profile is named by its size.
func TestMockMIGProfileWithoutName(t *testing.T) {
	session, server := openMock(t)
	d := device(server, 5)
	_, _ = d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	const mib = 4864
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if i != 4 {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return createMIG("MIG-7f8c", 9, 0, "NVIDIA A100", mib), nvml.SUCCESS
	}
	got := readTopology(t, session, createHost(t, map[string]string{
		"proc/driver/nvidia-caps/mig-minors": "gpu5/gi9/access 300\ngpu5/gi9/ci0/access 301\n",
	})).Devices[5]
	want := []gpu.MIGDevice{{
		Attributes: gpu.MIGAttributes{GPUSlices: 1, ComputeSlices: 1},
		Index:      4, UUID: "MIG-7f8c", Profile: "1g.5gb", GPUInstance: 9, ComputeInstance: 0,
		GPUInstanceCap: 300, ComputeInstanceCap: 301, MemoryBytes: mib << 20,
	}}
	if diff := cmp.Diff(want, got.MIG); diff != "" || got.Error != "" {
		t.Errorf("error %q, MIG devices (-want +got):\n%s", got.Error, diff)
	}
}

func createMIG(uuid string, gi, ci int, name string, mib uint64) nvml.Device {
	return &mock.Device{
		GetUUIDFunc:              func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
		GetNameFunc:              func() (string, nvml.Return) { return name, nvml.SUCCESS },
		GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return gi, nvml.SUCCESS },
		GetComputeInstanceIdFunc: func() (int, nvml.Return) { return ci, nvml.SUCCESS },
		GetAttributesFunc: func() (nvml.DeviceAttributes, nvml.Return) {
			a := nvml.DeviceAttributes{GpuInstanceSliceCount: 1, ComputeInstanceSliceCount: 1, MemorySizeMB: mib}
			return a, nvml.SUCCESS
		},
	}
}

func TestDriverWithoutGPUs(t *testing.T) {
	session, server := openMock(t)
	server.Devices = nil
	s := readTopology(t, session, createHost(t, nil))
	if s.DriverVersion != "550.54.15" || len(s.Devices) != 0 {
		t.Errorf("got the snapshot %+v, want one without devices", s)
	}
}
