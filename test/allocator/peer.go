// Package allocator compares the product's allocator with the policy of NVIDIA's device plugin, on the same machines: what
// the two choose, and how long they take.
package allocator

import (
	"github.com/NVIDIA/go-gpuallocator/gpuallocator"

	"gpu-cdi-plugin/gpu"
)

// peerDevices are the GPUs of a snapshot as NVIDIA's allocator would have them from the driver. For two GPUs that NVLinks
// join it has two links, one over PCIe and one for all NVLinks, and it adds their scores. NVLinks through an NVSwitch it
// does not see: it asks which GPU is on the other end, and that is none.
func peerDevices(s *gpu.Snapshot) gpuallocator.DeviceList {
	var devices gpuallocator.DeviceList
	for i := range s.Devices {
		d := &gpuallocator.Device{Index: i, Links: map[int][]gpuallocator.P2PLink{}}
		d.UUID = s.Devices[i].UUID
		devices = append(devices, d)
	}
	for _, l := range s.Links {
		peerLink(devices[l.A], devices[l.B], l)
		peerLink(devices[l.B], devices[l.A], l)
	}
	return devices
}

func peerLink(from, to *gpuallocator.Device, l gpu.Link) {
	// The kinds of links have the numbers of gpu.PCIePath; behind them follow those of one NVLink, two and so on.
	const noNVLink = 6
	if l.PCIe != gpu.PathUnknown {
		from.Links[to.Index] = append(from.Links[to.Index], linkOf(to, int(l.PCIe)))
	}
	if l.NVLinks > 0 && !l.Switched {
		from.Links[to.Index] = append(from.Links[to.Index], linkOf(to, noNVLink+l.NVLinks))
	}
}

func linkOf(to *gpuallocator.Device, kind int) gpuallocator.P2PLink {
	l := gpuallocator.P2PLink{GPU: to}
	setKind(&l.Type, kind)
	return l
}

// setKind sets a type that cannot be named here, as it is internal to the other module.
func setKind[T ~uint](t *T, kind int) { *t = T(kind) }
