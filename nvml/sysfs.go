package nvml

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/lazy"
)

// readShort reads a file of /sys or /proc that holds a line or a few.
func readShort(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// numaNode is the NUMA node that the device at the PCI address is attached to. NVML is not asked: its
// nvmlDeviceGetNumaNodeId is about the GPU's memory where that is a NUMA node of its own.
func numaNode(h host.Host, pciBusID string) int {
	n, err := strconv.Atoi(readShort(h.Sys("bus", "pci", "devices", pciBusID, "numa_node")))
	if err != nil || n < 0 {
		return gpu.NoNUMANode
	}
	return n
}

// gpuAddresses are the PCI addresses of the NVIDIA GPUs that the kernel knows, sorted.
func gpuAddresses(h host.Host) []string {
	entries, err := os.ReadDir(h.Sys("bus", "pci", "devices"))
	if err != nil {
		return nil
	}
	var addresses []string
	for _, e := range entries {
		dir := h.Sys("bus", "pci", "devices", e.Name())
		class := readShort(filepath.Join(dir, "class"))
		isGPU := strings.HasPrefix(class, "0x0300") || strings.HasPrefix(class, "0x0302") // VGA or 3D controller
		if isGPU && readShort(filepath.Join(dir, "vendor")) == "0x10de" {
			addresses = append(addresses, e.Name())
		}
	}
	slices.Sort(addresses)
	return addresses
}

// fillAddresses gives devices that did not say their PCI address the ones that are left over. NVML enumerates GPUs by
// PCI address; where they are not in that order, or their number differs, nothing is guessed.
func fillAddresses(devices []gpu.Device, all []string) {
	left := slices.Clone(all)
	for _, d := range devices {
		left = slices.DeleteFunc(left, func(a string) bool { return a == d.PCIBusID })
	}
	filled := make([]string, len(devices))
	for i, d := range devices {
		filled[i] = d.PCIBusID
		if filled[i] == "" && len(left) > 0 {
			filled[i], left = left[0], left[1:]
		}
	}
	if len(left) > 0 || !slices.IsSorted(filled) || slices.Contains(filled, "") {
		return
	}
	for i := range devices {
		devices[i].PCIBusID = filled[i]
	}
}

var versionNumber = lazy.Regexp(`\b[0-9]+\.[0-9]+(\.[0-9]+)?\b`)

// kernelVersion is the version of the loaded kernel module, or words that say that it is not known.
func kernelVersion(h host.Host) string {
	if v := readShort(h.Sys("module", "nvidia", "version")); v != "" {
		return v
	}
	line, _, _ := strings.Cut(readShort(h.Proc("driver", "nvidia", "version")), "\n")
	if v := versionNumber().FindString(line); v != "" {
		return v
	}
	return "of an unknown version"
}

// sysfsPath is how far apart two GPUs are on PCIe by their places in the tree of sysfs, and by their NUMA nodes where
// they are under different host bridges. The levels are those of nvmlGpuTopologyLevel_t.
func sysfsPath(h host.Host, a, b *gpu.Device) gpu.PCIePath {
	x, y := pciAncestors(h, a.PCIBusID), pciAncestors(h, b.PCIBusID)
	common := 0
	for common < min(len(x), len(y)) && x[common] == y[common] {
		common++
	}
	sameNode := a.NUMANode == b.NUMANode
	switch {
	case common > 1 && max(len(x), len(y))-common <= 1: // the ports of one switch
		return gpu.PathSingleSwitch
	case common > 1:
		return gpu.PathMultipleSwitches
	case common == 1:
		return gpu.PathHostBridge
	case a.NUMANode == gpu.NoNUMANode || b.NUMANode == gpu.NoNUMANode:
		return gpu.PathUnknown
	case sameNode:
		return gpu.PathNode
	default:
		return gpu.PathSystem
	}
}

// pciAncestors are the host bridge and the bridges above a device, from the top; none if sysfs does not show them.
func pciAncestors(h host.Host, pciBusID string) []string {
	target, err := os.Readlink(h.Sys("bus", "pci", "devices", pciBusID))
	if err != nil {
		return nil
	}
	_, path, _ := strings.Cut(target, "devices/")
	parts := strings.Split(path, "/")
	return parts[:len(parts)-1]
}
