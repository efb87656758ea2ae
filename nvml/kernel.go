package nvml

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// addFromKernel adds to the devices what only the kernel shows: NUMA nodes, the device nodes of MIG devices, and the
// identity of GPUs that could not be read.
func (s *Session) addFromKernel(ctx context.Context, devices []gpu.Device) {
	h := s.opts.Host
	addCapMinors(h, devices)
	if slices.ContainsFunc(devices, func(d gpu.Device) bool { return d.PCIBusID == "" }) {
		fillAddresses(devices, gpuAddresses(h))
	}
	ctx, cancel := context.WithTimeout(ctx, s.wait())
	defer cancel()
	for i := range devices {
		d := &devices[i]
		d.NUMANode = gpu.NoNUMANode
		if d.PCIBusID == "" {
			continue
		}
		d.NUMANode = numaNode(h, d.PCIBusID)
		d.PCIClass = host.ReadLine(h.Sys("bus", "pci", "devices", d.PCIBusID, "class"))
		if d.UUID == "" {
			s.readInformation(ctx, d)
		}
	}
}

// readInformation adds the names and numbers of a GPU from /proc/driver/nvidia/gpus/ADDRESS/information. Reading the
// file can hang like a call into the driver, since the same kernel module writes it.
func (s *Session) readInformation(ctx context.Context, d *gpu.Device) {
	path := s.opts.Host.Proc("driver", "nvidia", "gpus", d.PCIBusID, "information")
	work := func(c *call) (string, error) {
		c.enter("read")
		return host.ReadLine(path), nil
	}
	text, err := ask(ctx, &s.library.calls, "information about "+d.PCIBusID, s.tolerated(), work)
	if err != nil {
		return
	}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch {
		case key == "GPU UUID" && strings.HasPrefix(value, "GPU-") && gpu.IsUUID(value[len("GPU-"):]):
			d.UUID = value // an unknown UUID has question marks instead of digits
		case key == "Model" && d.Name == "":
			d.Name = value
		case key == "Device Minor" && d.Minor == gpu.NoMinor:
			if minor, err := strconv.Atoi(value); err == nil && minor >= 0 {
				d.Minor = minor
			}
		}
	}
}

// numaNode returns the NUMA node to which the device at a PCI address is attached. NVML's nvmlDeviceGetNumaNodeId is
// something else: the node of the GPU's own memory, if that is a NUMA node.
func numaNode(h host.Host, pciBusID string) int {
	n, err := strconv.Atoi(host.ReadLine(h.Sys("bus", "pci", "devices", pciBusID, "numa_node")))
	if err != nil || n < 0 {
		return gpu.NoNUMANode
	}
	return n
}

// gpuAddresses returns the PCI addresses of the NVIDIA GPUs that the kernel knows, sorted.
func gpuAddresses(h host.Host) []string {
	entries, err := os.ReadDir(h.Sys("bus", "pci", "devices"))
	if err != nil {
		return nil
	}
	var addresses []string
	for _, e := range entries {
		dir := h.Sys("bus", "pci", "devices", e.Name())
		class := host.ReadLine(filepath.Join(dir, "class"))
		isGPU := strings.HasPrefix(class, "0x0300") || strings.HasPrefix(class, "0x0302") // VGA or 3D controller
		if isGPU && host.ReadLine(filepath.Join(dir, "vendor")) == "0x10de" {
			addresses = append(addresses, e.Name())
		}
	}
	slices.Sort(addresses)
	return addresses
}

// fillAddresses gives the addresses that no device has to the devices without a PCI address. NVML enumerates GPUs by
// PCI address; if the devices are not in that order, or there are more or fewer addresses, these devices get none.
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

// sysfsPath returns how far apart two GPUs are on PCIe, by their positions in sysfs. If they are under different host
// bridges, their NUMA nodes decide. The levels are those of nvmlGpuTopologyLevel_t.
func sysfsPath(h host.Host, a, b *gpu.Device) gpu.PCIePath {
	x, y := pciAncestors(h, a.PCIBusID), pciAncestors(h, b.PCIBusID)
	common := 0
	for common < min(len(x), len(y)) && x[common] == y[common] {
		common++
	}
	switch {
	case common > 1 && max(len(x), len(y))-common <= 1: // the ports of one switch
		return gpu.PathSingleSwitch
	case common > 1:
		return gpu.PathMultipleSwitches
	case common == 1:
		return gpu.PathHostBridge
	case a.NUMANode == gpu.NoNUMANode || b.NUMANode == gpu.NoNUMANode:
		return gpu.PathUnknown
	case a.NUMANode == b.NUMANode:
		return gpu.PathNode
	default:
		return gpu.PathSystem
	}
}

// pciAncestors returns the host bridge and the bridges above a device, from the top. If sysfs does not show them, it
// returns none.
func pciAncestors(h host.Host, pciBusID string) []string {
	target, err := os.Readlink(h.Sys("bus", "pci", "devices", pciBusID))
	if err != nil {
		return nil
	}
	_, path, _ := strings.Cut(target, "devices/")
	parts := strings.Split(path, "/")
	return parts[:len(parts)-1]
}
