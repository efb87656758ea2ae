// Package topology draws a node as an SVG picture: its NUMA nodes, the PCIe and NVLink connections of its GPUs, their
// MIG devices and health, and the containers that hold them.
//
// WriteSVG works in two pure steps: newLayout computes the positions of the GPUs and their links, draw writes the
// shapes. The same node gives the same bytes.
//
// The cards of the GPUs are in one row. Below the row are bars, one for each switch, bridge and NUMA node: two GPUs
// communicate over PCIe through the first bar below them that spans both. Above the row are the NVLinks: a bracket for
// each pair that is linked directly, and a bar for NVSwitches. No meaning is shown by colour only. Every GPU, bar and
// NVLink is an element with data attributes, so that programs can find it.
//
// The package reads nothing from the host. A snapshot comes from the driver, the holders from the kubelet. Neither is
// trusted: texts are cleaned, cut and escaped.
package topology

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wording"
)

// Node is a node to draw.
type Node struct {
	Snapshot *gpu.Snapshot
	// Holders are the containers that hold devices. Devices that are not in the snapshot are ignored.
	Holders []podresources.Holder
	// HoldersUnknown says why the holders are not known, or is empty.
	HoldersUnknown string
}

// WriteSVG writes the picture of a node as an SVG file that needs no script, font or style sheet. Its errors are those
// of w.
func WriteSVG(w io.Writer, n Node) error {
	if _, err := w.Write(draw(newScene(n))); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	return nil
}

// scene is what the drawing shows. In it a GPU is named by its index in the snapshot.
type scene struct {
	Node
	links   links
	root    *group // the NUMA nodes, with the groups in them
	fabrics [][]int
	direct  [][2]int // pairs with direct NVLinks
	holders []holder
	uses    map[string][]use // by device UUID
}

func newScene(n Node) *scene {
	s := &scene{Node: n, links: linksOf(n.Snapshot)}
	s.root = treeOf(n.Snapshot, s.links)
	s.fabrics = fabricsOf(s.links, len(n.Snapshot.Devices))
	s.direct = slices.DeleteFunc(s.links.pairs(), func(p [2]int) bool {
		return s.links[p].NVLinks <= 0 || s.links[p].Switched
	})
	s.holders, s.uses = holdersOf(n)
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

// title returns the number of GPUs of each model, in the order in which the models first occur.
func (s *scene) title() string {
	var models []string
	counts := map[string]int{}
	for i := range s.Snapshot.Devices {
		if name := clean(s.gpu(i).Name); name != "" {
			if counts[name] == 0 {
				models = append(models, name)
			}
			counts[name]++
		}
	}
	for i, name := range models {
		models[i] = fmt.Sprintf("%d × %s", counts[name], name)
	}
	if len(models) == 0 {
		return wording.Count(len(s.Snapshot.Devices), "GPU")
	}
	return strings.Join(models, ", ")
}

// subtitle returns the driver's version and the numbers of GPUs and containers.
func (s *scene) subtitle() string {
	var parts []string
	if v := clean(s.Snapshot.DriverVersion); v != "" {
		parts = append(parts, "driver "+v)
	}
	if v := clean(s.Snapshot.CUDAVersion); v != "" {
		parts = append(parts, "CUDA "+v)
	}
	gpus := wording.Count(len(s.Snapshot.Devices), "GPU")
	if n := len(s.unusable()); n > 0 {
		parts = append(parts, fmt.Sprintf("%d of %s unusable", n, gpus))
	} else {
		parts = append(parts, gpus+" usable")
	}
	if s.HoldersUnknown == "" {
		parts = append(parts, "devices held by "+wording.Count(len(s.holders), "container"))
	}
	return strings.Join(parts, " · ")
}

// numaName names a group after the NUMA nodes of its GPUs.
func (s *scene) numaName(g *group) string {
	var nodes []int
	for _, p := range g.gpus {
		if n := s.gpu(p).NUMANode; n >= 0 {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	var names []string
	for _, n := range slices.Compact(nodes) {
		names = append(names, strconv.Itoa(n))
	}
	switch len(names) {
	case 0:
		return "NUMA unknown"
	case 1:
		return "NUMA node " + names[0]
	default:
		return "NUMA nodes " + strings.Join(names, ", ")
	}
}
