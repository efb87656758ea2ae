// Package topology draws a node: its NUMA nodes, how its GPUs hang together on PCIe, their NVLinks, their health and who
// holds them.
//
// Draw is a pure function from what is known of a node to a Picture, a value that says where everything is;
// Picture.WriteSVG writes that down. The same node gives the same bytes.
//
// In the picture the GPUs stand in rows. Below them lie bars: two GPUs speak over PCIe through the first bar below that
// carries both. Above them are the NVLinks: a bracket for each pair that is joined directly, a bar for NVSwitches.
// Whatever carries a meaning says it in words, shape or number too, not by its colour alone, and every GPU, bar and
// NVLink is an element of its own with data attributes, so that a program can find it.
//
// The package asks nobody: a snapshot comes from the driver, the holders from the kubelet. Both are hostile: names are
// cleaned, cut and escaped.
package topology

import (
	"slices"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// Node is what is known of a node.
type Node struct {
	Snapshot *gpu.Snapshot
	// Holders are the containers that hold devices. Those of devices that the snapshot has not are left out.
	Holders []Holder
	// HoldersUnknown says why it is not known who holds what, or is empty.
	HoldersUnknown string
}

// Holder is a container that holds devices.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Devices are the IDs that the device plugin gave out: UUIDs of GPUs and MIG devices, or replicas of them ("UUID::n").
	Devices []string `json:"devices"`
}

// DeviceHolders are the holders of devices that the node has, with these devices alone.
func (n Node) DeviceHolders() []Holder {
	names := deviceNames(n)
	list := []Holder{}
	for _, h := range n.Holders {
		ours := slices.DeleteFunc(slices.Clone(h.Devices), func(id string) bool {
			_, ok := names[uuidOf(id)]
			return !ok
		})
		if len(ours) > 0 {
			list = append(list, Holder{h.Namespace, h.Pod, h.Container, ours})
		}
	}
	return list
}

// uuidOf is the UUID of the device that an ID of the device plugin names: replicas have a number behind it.
func uuidOf(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	return uuid
}

// Draw lays out the picture of a node.
func Draw(n Node) Picture {
	l := newLayout(n)
	l.rows()
	l.legend()
	return l.picture()
}
