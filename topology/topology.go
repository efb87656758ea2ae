// Package topology draws a node as an SVG picture: its NUMA nodes, the PCIe and NVLink connections of its GPUs, their
// MIG devices and health, and the pods that hold them.
//
// WriteSVG works in two steps, both pure functions: arrange finds the position of every box and line, draw writes the
// shapes. The same node gives the same bytes.
//
// The cards of the GPUs are in rows. Below a row are bars, one for each switch, bridge and NUMA node: two GPUs talk
// over PCIe through the first bar below that spans both. Above a row are the NVLinks: a bracket for each pair that is
// linked directly, a bar for NVSwitches. Colour never carries a meaning alone. Every GPU, bar and NVLink is an element
// with data attributes, so that a program can find it.
//
// The package reads nothing from the host. A snapshot comes from the driver and the holders from the kubelet; neither
// is trusted: texts are cleaned, cut and escaped.
package topology

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// Node is a node to draw.
type Node struct {
	Snapshot *gpu.Snapshot
	// Holders are the containers that hold devices. Devices that are not in the snapshot are left out.
	Holders []Holder
	// HoldersUnknown is the reason why the holders are not known, or empty.
	HoldersUnknown string
}

// Holder is a container that holds devices.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Devices are device plugin IDs: UUIDs of GPUs and MIG devices, or of replicas ("UUID::n").
	Devices []string `json:"devices"`
}

// DeviceHolders returns the holders of the node's devices, without devices of other resources.
func (n Node) DeviceHolders() []Holder {
	names := deviceNames(n.Snapshot)
	list := []Holder{}
	for _, h := range n.Holders {
		h.Devices = slices.DeleteFunc(slices.Clone(h.Devices), func(id string) bool {
			_, ok := names[uuidOf(id)]
			return !ok
		})
		if len(h.Devices) > 0 {
			list = append(list, h)
		}
	}
	return list
}

// uuidOf returns the UUID in a device plugin ID.
func uuidOf(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	return uuid
}

// WriteSVG writes the picture of a node as an SVG file that needs no script, font or style sheet. The error is w's.
func WriteSVG(w io.Writer, n Node) error {
	s := newScene(n)
	if _, err := w.Write(draw(s, arrange(s))); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	return nil
}

// scene is what there is to draw. It does not change. GPUs are numbered by their position in the snapshot.
type scene struct {
	Node
	links   links
	tree    []*group       // the NUMA nodes, with the groups in them
	levels  []gpu.PCIePath // of the groups in NUMA nodes, from near to far
	fabrics []fabric
	direct  [][2]int // pairs with direct NVLinks
	pods    []pod
	uses    map[string][]use // by device UUID
	small   bool             // cards are small

	cardWidth, cardsPerRow int
}

// fullSize is the number of GPUs up to which the cards have their full size.
const fullSize = 16

func newScene(n Node) *scene {
	s := &scene{Node: n, links: linksOf(n.Snapshot), cardWidth: 118, cardsPerRow: 8}
	if len(n.Snapshot.Devices) > fullSize {
		s.small, s.cardWidth, s.cardsPerRow = true, 68, 16
	}
	s.tree = numaGroups(n.Snapshot, s.links)
	s.levels = levelsOf(s.tree)
	s.fabrics = fabricsOf(s.links, len(n.Snapshot.Devices))
	s.direct = slices.DeleteFunc(s.links.pairs(), func(p [2]int) bool {
		return s.links[p].NVLinks <= 0 || s.links[p].Switched
	})
	s.pods, s.uses = podsOf(n)
	return s
}

func (s *scene) gpu(i int) *gpu.Device { return &s.Snapshot.Devices[i] }

func (s *scene) unusable() []*gpu.Device {
	var list []*gpu.Device
	for i := range s.Snapshot.Devices {
		if d := s.gpu(i); !d.Usable() {
			list = append(list, d)
		}
	}
	return list
}
