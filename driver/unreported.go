package driver

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// kernelDevices are the devices of the loaded kernel module. The driver's library does not report those whose device
// nodes are missing.
type kernelDevices struct {
	gpus []string // PCI addresses; none if the module is configured to exclude some GPUs
	mig  []migInstance
}

// migInstance is a compute instance of a GPU in MIG mode.
type migInstance struct {
	name  string // such as "gpu0/mig/gi1/ci0"
	nodes []string
	cap   int // the minor number of its own device node
}

// readKernelDevices reads lists that the module keeps in memory. The information about a single GPU could hang with it.
func readKernelDevices(h host.Host) kernelDevices {
	var k kernelDevices
	if params, _ := fileio.ReadFile(h.Proc("driver", "nvidia", "params"), 64<<10); !excludesGPUs(string(params)) {
		k.gpus = host.ModuleGPUs(h)
	}
	dir := h.Proc("driver", "nvidia", "capabilities")
	instances, _ := filepath.Glob(filepath.Join(dir, "gpu*", "mig", "gi*", "ci*"))
	for _, ci := range instances {
		giCap, ciCap := capMinor(filepath.Dir(ci)), capMinor(ci)
		if giCap < 0 || ciCap < 0 {
			continue
		}
		k.mig = append(k.mig, migInstance{
			name: strings.TrimPrefix(ci, dir+"/"), nodes: []string{capNode(giCap), capNode(ciCap)}, cap: ciCap,
		})
	}
	return k
}

// excludesGPUs reports whether the module's parameters exclude GPUs, for example:
//
//	ExcludedGpus: "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c"
func excludesGPUs(params string) bool {
	for line := range strings.Lines(params) {
		key, value, _ := strings.Cut(line, ":")
		if key == "ExcludedGpus" && strings.Trim(value, " \"\n") != "" {
			return true
		}
	}
	return false
}

// capMinor reads the minor number of the device node of a MIG instance, or returns gpu.NoMinor.
func capMinor(dir string) int {
	for line := range strings.Lines(host.ReadLine(filepath.Join(dir, "access"))) {
		key, value, _ := strings.Cut(line, ":")
		if minor, err := strconv.Atoi(strings.TrimSpace(value)); key == "DeviceFileMinor" && err == nil {
			return minor
		}
	}
	return gpu.NoMinor
}

// MIGCapability is a file of the kernel module that describes a device node of a MIG instance.
type MIGCapability struct {
	File string // below the directory that has proc, such as proc/driver/nvidia/capabilities/gpu0/mig/gi1/access
	Node string // below the directory dev, such as nvidia-caps/nvidia-cap12
}

// MIGCapabilities returns the capabilities of all MIG instances.
func MIGCapabilities(h host.Host) []MIGCapability {
	var list []MIGCapability
	for _, pattern := range []string{"gi*", "gi*/ci*"} {
		dirs, _ := filepath.Glob(h.Proc("driver", "nvidia", "capabilities", "gpu*", "mig", pattern))
		for _, dir := range dirs {
			if minor := capMinor(dir); minor >= 0 {
				file := strings.TrimPrefix(filepath.Join(dir, "access"), strings.TrimSuffix(h.Root(), "/")+"/")
				list = append(list, MIGCapability{File: file, Node: strings.TrimPrefix(capNode(minor), "/dev/")})
			}
		}
	}
	return list
}

func capNode(minor int) string { return "/dev/nvidia-caps/nvidia-cap" + strconv.Itoa(minor) }

// Unreported returns findings about the GPUs and MIG devices of the kernel module that a snapshot lacks since a device
// node is missing.
func (d *Driver) Unreported(s *gpu.Snapshot) []Finding {
	var list []Finding
	reported, caps := map[string]bool{}, map[int]bool{}
	for i := range s.Devices {
		reported[s.Devices[i].PCIBusID] = true
		for _, m := range s.Devices[i].MIG {
			caps[m.ComputeInstanceCap] = true
		}
	}
	has := func(node string) bool {
		return slices.ContainsFunc(d.Nodes, func(n DeviceNode) bool { return n.Path == node })
	}
	nodes := 0
	for _, n := range d.Nodes {
		if isNumbered(path.Base(n.Path), "nvidia") {
			nodes++
		}
	}
	for _, address := range d.kernel.gpus {
		if !reported[address] && !reported[""] && nodes < len(d.kernel.gpus) {
			list = append(list, Finding{
				Name: "GPU at " + address, Kind: KindDevice, Capabilities: All, Broken: true,
				Note: fmt.Sprintf("the driver does not report it: its kernel module has %d GPUs, and /dev has %d of their "+
					"device nodes", len(d.kernel.gpus), nodes),
			})
		}
	}
	for _, m := range d.kernel.mig {
		missing := slices.IndexFunc(m.nodes, func(n string) bool { return !has(n) })
		if missing >= 0 && !caps[m.cap] {
			list = append(list, Finding{
				Name: "MIG device " + m.name, Kind: KindDevice, Capabilities: All, Broken: true,
				Note: d.WhyNoNode(m.nodes[missing]),
			})
		}
	}
	return list
}
