package nvml

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// expectUnreadable returns the snapshot that is expected when one GPU becomes unreadable: that GPU is as in got, it has
// no links, and all else is as before.
func expectUnreadable(before, got *gpu.Snapshot, index int) *gpu.Snapshot {
	want := *before
	want.Devices = slices.Clone(before.Devices)
	want.Devices[index] = got.Devices[index]
	hasGPU := func(l gpu.Link) bool { return l.A == index || l.B == index }
	want.Links = slices.DeleteFunc(slices.Clone(before.Links), hasGPU)
	return &want
}

func TestLostGPU(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "dgx-h100")
	session, h := openNode(t, node)
	before := readTopology(t, session, h)
	testenv.Must(t, node.Lose(3))
	got := readTopology(t, session, h)
	if diff := cmp.Diff(expectUnreadable(before, got, 3), got); diff != "" {
		t.Errorf("the others (-before +after):\n%s", diff)
	}
	lost := got.Devices[3]
	if !strings.HasPrefix(lost.Error, "nvmlDeviceGetHandleByIndex: ") || !strings.Contains(lost.Error, "lost") {
		t.Errorf("the lost GPU's error is %q", lost.Error)
	}
	want := before.Devices[3]
	want.MemoryBytes, want.ComputeCapability, want.MIGCapable, want.Error = 0, "", false, lost.Error
	if diff := cmp.Diff(want, lost); diff != "" {
		t.Errorf("the lost GPU, as sysfs and the kernel module show it (-want +got):\n%s", diff)
	}
	testenv.Must(t, node.Clear())
	compareToNode(t, node, readTopology(t, session, h))
}

// The functions that are called for each GPU, for its links, and for its MIG devices.
var (
	functionsOfGPU = []string{
		"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber",
		"nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode",
	}
	functionsOfLinks = []string{
		"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetNvLinkRemoteDeviceType",
		"nvmlDeviceGetTopologyCommonAncestor",
	}
	functionsOfMIG = []string{
		"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId",
		"nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes",
	}
)

// Each function in turn fails for one GPU: that GPU has an error that names it, the others are as before.
func TestEachCallFails(t *testing.T) {
	for machine, c := range map[string]struct {
		gpu       int
		functions []string
	}{
		"dgx-h100": {3, slices.Concat(functionsOfGPU, functionsOfLinks)},
		"mig-h100": {0, slices.Concat(functionsOfGPU, functionsOfMIG)},
	} {
		t.Run(machine, func(t *testing.T) {
			if !runAlone(t) {
				return
			}
			node := createNode(t, machine)
			session, h := openNode(t, node)
			before := readTopology(t, session, h)
			for _, function := range c.functions {
				fail(t, node, function, c.gpu, nvml.ERROR_UNKNOWN)
				got := readTopology(t, session, h)
				if text := got.Devices[c.gpu].Error; !strings.Contains(text, function+": Unknown Error") {
					t.Errorf("%s fails: the GPU's error is %q", function, text)
				}
				if diff := cmp.Diff(expectUnreadable(before, got, c.gpu), got); diff != "" {
					t.Errorf("%s fails: the others (-before +after):\n%s", function, diff)
				}
				testenv.Must(t, node.Clear())
			}
			compareToNode(t, node, readTopology(t, session, h))
		})
	}
}

// A function that a GPU or an old driver need not support is no error.
func TestOptionalCallsAreNotSupported(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "dgx-h100")
	session, h := openNode(t, node)
	for _, function := range slices.Concat(functionsOfGPU[4:], functionsOfLinks) {
		fail(t, node, function, 3, nvml.ERROR_NOT_SUPPORTED)
		if got := readTopology(t, session, h); !got.Devices[3].Usable() || len(got.Links) != 28 {
			t.Errorf("%s is not supported: error %q, %d links", function, got.Devices[3].Error, len(got.Links))
		}
		testenv.Must(t, node.Clear())
	}
	for _, function := range functionsOfGPU[:4] {
		fail(t, node, function, 3, nvml.ERROR_NOT_SUPPORTED)
		if got := readTopology(t, session, h); got.Devices[3].Usable() {
			t.Errorf("%s is not supported, and the GPU has no error", function)
		}
		testenv.Must(t, node.Clear())
	}
}

func TestSystemCallsFail(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "workstation")
	session, h := openNode(t, node)
	for _, function := range []string{"nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"} {
		fail(t, node, function, sim.AnyGPU, nvml.ERROR_UNKNOWN)
		_, err := session.readTopology(t.Context())
		checkError(t, err, ErrDriverFailed, function+": Unknown Error")
		testenv.Must(t, node.Clear())
	}
	fail(t, node, "nvmlSystemGetCudaDriverVersion", sim.AnyGPU, nvml.ERROR_UNKNOWN)
	if s := readTopology(t, session, h); s.CUDAVersion != "" || !s.Devices[0].Usable() {
		t.Errorf("without a CUDA version the snapshot is %+v", s)
	}
	testenv.Must(t, node.Clear())
}

func TestMIGIsReconfigured(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "dgx-h100")
	session, h := openNode(t, node)
	for _, profiles := range [][]string{
		{"1g.10gb", "1g.10gb+me", "3g.40gb"}, {"1c.3g.40gb", "1c.3g.40gb", "1g.20gb"}, {}, {"7g.80gb"},
	} {
		testenv.Must(t, node.SetMIG(5, profiles))
		got := readTopology(t, session, h)
		compareToNode(t, node, got)
		if d := got.Devices[5]; !d.MIGEnabled || len(d.MIG) != len(profiles) {
			t.Errorf("with the profiles %q the GPU is %+v", profiles, d)
		}
	}
	remove(t, filepath.Join(node.Root(), "proc/driver/nvidia-caps/mig-minors"))
	m := readTopology(t, session, h).Devices[5].MIG[0]
	if m.GPUInstanceCap != gpu.NoMinor || m.ComputeInstanceCap != gpu.NoMinor {
		t.Errorf("without the minors' file the MIG device is %+v", m)
	}
	writeFile(t, filepath.Join(node.Root(), "proc/driver/nvidia-caps/mig-minors"), "?")
	if got := readTopology(t, session, h); got.Devices[5].Usable() || !got.Devices[4].Usable() {
		t.Errorf("with a malformed file GPU 5 has the error %q, GPU 4 %q", got.Devices[5].Error, got.Devices[4].Error)
	}
}
