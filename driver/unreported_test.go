package driver

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

// NVML does not report a device without its device nodes, which the kernel module knows.
func TestUnreportedDevices(t *testing.T) {
	testenv.Root(t)
	const (
		first, second = "0000:01:00.0", "0000:02:00.0"
		capabilities  = "/proc/driver/nvidia/capabilities/gpu0/mig/gi1"
		lost          = "the driver does not report it: its kernel module has 2 GPUs, and /dev has 1 of their device nodes"
	)
	gpus := func(addresses ...string) *gpu.Snapshot {
		s := &gpu.Snapshot{}
		for _, a := range addresses {
			s.Devices = append(s.Devices, gpu.Device{PCIBusID: a})
		}
		return s
	}
	for name, c := range map[string]struct {
		nodes    []string // under /dev, besides /dev/nvidia0
		params   string
		access   string // the file of the compute instance; that of its GPU instance is the same but for the number
		snapshot *gpu.Snapshot
		want     map[string]string // notes by name
	}{
		"all are reported": {[]string{"nvidia1"}, "", "", gpus(first, second), nil},
		"a GPU without its device node": {
			nil, "ResmanDebugLevel: 4294967295\nExcludedGpus: \"\"\n", "", gpus(first),
			map[string]string{"GPU at " + second: lost},
		},
		"a GPU whose driver has another reason": {[]string{"nvidia1"}, "", "", gpus(first), nil},
		"the module excludes GPUs":              {nil, "ExcludedGpus: \"GPU-1\"\n", "", gpus(first), nil},
		"a GPU with an unknown address":         {nil, "", "", gpus(first, ""), nil},
		"nodes with other names": {
			[]string{"nvidia-uvm", "nvidiactl"}, "", "", gpus(first), map[string]string{"GPU at " + second: lost},
		},
		"a MIG device without nodes": {
			[]string{"nvidia1"},
			"", "DeviceFileMinor: 2\nDeviceFileMode: 292\n", gpus(first, second),
			map[string]string{"MIG device gpu0/mig/gi1/ci0": "no device node /dev/nvidia-caps/nvidia-cap1"},
		},
		"a MIG device without the node of its compute instance": {
			[]string{"nvidia1", "nvidia-caps/nvidia-cap1"},
			"", "DeviceFileMinor: 2\n", gpus(first, second),
			map[string]string{"MIG device gpu0/mig/gi1/ci0": "no device node /dev/nvidia-caps/nvidia-cap2"},
		},
		"a MIG device with nodes": {
			[]string{"nvidia1", "nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"},
			"", "DeviceFileMinor: 2\n",
			gpus(first, second), nil,
		},
		"a MIG device that is reported": {
			[]string{"nvidia1"},
			"", "DeviceFileMinor: 2\n",
			&gpu.Snapshot{Devices: []gpu.Device{
				{PCIBusID: first, MIG: []gpu.MIGDevice{{ComputeInstanceCap: 2}}}, {PCIBusID: second},
			}}, nil,
		},
		"a MIG device whose nodes are unknown": {
			[]string{"nvidia1"}, "", "DeviceFileMinor: x\nDeviceFileMode: 292\n", gpus(first, second), nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			r.node("/dev/nvidia0")
			for _, n := range c.nodes {
				r.node("/dev/" + n)
			}
			for _, a := range []string{first, second} {
				testenv.Must(t, os.Mkdir(r.path("/proc/driver/nvidia/gpus/"+a), 0o755))
			}
			if c.params != "" {
				r.file("/proc/driver/nvidia/params", c.params, 0o644)
			}
			if c.access != "" {
				r.file(capabilities+"/access", "DeviceFileMode: 292\nDeviceFileMinor: 1\n", 0o444)
				r.file(capabilities+"/ci0/access", c.access, 0o444)
			}
			var got map[string]string
			for _, f := range DiscoverNodes(r.host()).Unreported(c.snapshot) {
				if got == nil {
					got = map[string]string{}
				}
				got[f.Name] = f.Note
				if f.Kind != KindDevice || !f.Broken || f.Used {
					t.Errorf("finding %+v", f)
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestLack(t *testing.T) {
	for name, c := range map[string]struct {
		finding Finding
		want    string
	}{
		"a missing file": {
			Finding{Name: "nvidia-smi", Kind: KindBinary, Missing: "libnvidia-ml"},
			"containers do not get nvidia-smi, which was not found although libnvidia-ml was",
		},
		"a directory in the place of a file": {
			Finding{
				Name: "nvidia-smi", Kind: KindBinary, Missing: "libnvidia-ml", Path: "/usr/bin/nvidia-smi",
				Note: "a directory, not used",
			},
			"containers do not get nvidia-smi, since /usr/bin/nvidia-smi cannot be used: a directory, not used",
		},
		"a library that is broken and missing": {
			Finding{Name: "libx", Kind: KindLibrary, Missing: "libcuda", Broken: true, Note: "a link that leads nowhere"},
			"containers do not get the driver library libx, which cannot be used: a link that leads nowhere",
		},
		"a broken library": {
			Finding{Name: "libx", Kind: KindLibrary, Path: "/lib/libx.so", Broken: true, Note: "it is empty"},
			"containers do not get the driver library /lib/libx.so, which cannot be used: it is empty",
		},
		"a GPU": {
			Finding{Name: "GPU 1", Kind: KindDevice, Broken: true, Note: "no device node /dev/nvidia1"},
			"GPU 1 is left out: no device node /dev/nvidia1",
		},
		"a device node": {
			Finding{Name: "/dev/nvidia-uvm", Kind: KindNode, Broken: true, Note: notFound},
			"containers do not get the device node /dev/nvidia-uvm, without which CUDA does not start: not found",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got, advice := c.finding.Lack(); got != c.want || advice == "" {
				t.Errorf("got %q and the advice %q, want %q", got, advice, c.want)
			}
		})
	}
}

// A path is below a root only if all of the root's name is in it.
func TestPathsBelowARoot(t *testing.T) {
	for name, c := range map[string]struct {
		root, path string
		want       bool
	}{
		"the host":                    {"/", "/usr/lib64", true},
		"a driver container":          {"/run/driver", "/run/driver/usr/lib64", true},
		"elsewhere":                   {"/run/driver", "/usr/lib64", false},
		"a name that begins the same": {"/run/driver", "/run/driver2/usr/lib64", false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := newRoot(c.root).has(c.path); got != c.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
