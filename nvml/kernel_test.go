package nvml

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func TestNUMANode(t *testing.T) {
	h := createHost(t, map[string]string{
		"sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
		"sys/bus/pci/devices/0000:2b:00.0/numa_node": "-1\n",
		"sys/bus/pci/devices/0000:3b:00.0/numa_node": "one\n",
	})
	for address, want := range map[string]int{
		"0000:1b:00.0": 1, "0000:2b:00.0": gpu.NoNUMANode,
		"0000:3b:00.0": gpu.NoNUMANode, "0000:4b:00.0": gpu.NoNUMANode,
	} {
		if got := numaNode(h, address); got != want {
			t.Errorf("GPU at %s: NUMA node %d, want %d", address, got, want)
		}
	}
}

func TestGPUAddresses(t *testing.T) {
	h := createHost(t, map[string]string{
		"sys/bus/pci/devices/0000:5d:00.0/vendor": "0x10de\n",
		"sys/bus/pci/devices/0000:5d:00.0/class":  "0x030200\n",
		"sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
		"sys/bus/pci/devices/0000:1b:00.0/class":  "0x030000\n",
		"sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de\n",
		"sys/bus/pci/devices/0000:05:00.0/class":  "0x068000\n", // an NVSwitch
		"sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
		"sys/bus/pci/devices/0000:01:00.1/class":  "0x040300\n", // a GPU's sound
		"sys/bus/pci/devices/0000:03:00.0/vendor": "0x1a03\n",
		"sys/bus/pci/devices/0000:03:00.0/class":  "0x030000\n", // a server's console
	})
	if diff := cmp.Diff([]string{"0000:1b:00.0", "0000:5d:00.0"}, gpuAddresses(h)); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestFillAddresses(t *testing.T) {
	for name, c := range map[string]struct{ known, all, want []string }{
		"one lost GPU":             {[]string{"1", "", "3"}, []string{"1", "2", "3"}, []string{"1", "2", "3"}},
		"two lost GPUs":            {[]string{"", "2", ""}, []string{"1", "2", "3"}, []string{"1", "2", "3"}},
		"more addresses":           {[]string{"1", "", "4"}, []string{"1", "2", "3", "4"}, []string{"1", "", "4"}},
		"fewer addresses":          {[]string{"1", "", ""}, []string{"1", "2"}, []string{"1", "", ""}},
		"not NVML's order":         {[]string{"2", "", "3"}, []string{"1", "2", "3"}, []string{"2", "", "3"}},
		"no sysfs":                 {[]string{"1", ""}, nil, []string{"1", ""}},
		"GPUs not in PCI order":    {[]string{"3", "2", ""}, []string{"1", "2", "3"}, []string{"3", "2", ""}},
		"a GPU unknown to sysfs":   {[]string{"1", "2", ""}, []string{"2", "3"}, []string{"1", "2", "3"}},
		"all lost":                 {[]string{"", ""}, []string{"1", "2"}, []string{"1", "2"}},
		"one hidden from NVML":     {[]string{"1", "2"}, []string{"1", "2", "3"}, []string{"1", "2"}},
		"lost and hidden":          {[]string{"1", ""}, []string{"1", "2", "3"}, []string{"1", ""}},
		"more GPUs than addresses": {[]string{"1", "2", ""}, []string{"1", "2"}, []string{"1", "2", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			devices := make([]gpu.Device, len(c.known))
			for i := range devices {
				devices[i].PCIBusID = c.known[i]
			}
			fillAddresses(devices, c.all)
			var got []string
			for _, d := range devices {
				got = append(got, d.PCIBusID)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("addresses (-want +got):\n%s", diff)
			}
		})
	}
}
