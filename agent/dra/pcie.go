package dra

import (
	"os"
	"regexp"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

var pcieRoot = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)

// PCIeRoots returns the PCIe root of each GPU, such as "pci0000:00", by PCI address. Devices with the same root, also
// those of other drivers such as NICs, are below one root complex. A GPU is missing if sysfs does not say its root, as
// in some virtual machines.
func PCIeRoots(h host.Host, s *gpu.Snapshot) map[string]string {
	roots := map[string]string{}
	for i := range s.Devices {
		address := s.Devices[i].PCIBusID
		if address == "" {
			continue
		}
		// The link leads to ../../../devices/pci0000:00/..., through the bridges above the device.
		path, err := os.Readlink(h.Sys("bus", "pci", "devices", address))
		if err != nil {
			continue
		}
		_, below, _ := strings.Cut(path, "devices/")
		if root, _, _ := strings.Cut(below, "/"); pcieRoot.MatchString(root) {
			roots[address] = root
		}
	}
	return roots
}
