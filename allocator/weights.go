package allocator

import (
	"iter"

	"gpu-cdi-plugin/gpu"
)

// MaxWeight is the highest weight.
const MaxWeight = 10_000

// Weights are the scores of connections. A pair of GPUs has the weight of the nearest point on PCIe that both are
// below, plus a weight for each NVLink between the two. Weights are from 0 to MaxWeight and have no unit.
//
//	connection                                    key                 default
//	unknown                                                                 0
//	SYS     across the link between NUMA nodes    system                   10
//	NODE    across host bridges of a NUMA node    node                     20
//	PHB     through one host bridge               host-bridge              30
//	PXB     through several PCIe switches         multiple-switches        40
//	PIX     through one PCIe switch               single-switch            50
//	PSB     on one board                          same-board               60
//	each NVLink between the two                   nvlink                  100
//	each NVLink through NVSwitches                nvswitch                100
//
// The defaults are those of calculateGPUPairScore in NVIDIA's go-gpuallocator v0.5.0 (besteffort_policy.go), so that
// scores can be compared. That library ignores NVLinks to NVSwitches. Here they count, since a GPU that has lost some
// of its links to the switches is connected worse than the others.
type Weights struct {
	System           int `yaml:"system" json:"system"`
	Node             int `yaml:"node" json:"node"`
	HostBridge       int `yaml:"host-bridge" json:"host-bridge"`
	MultipleSwitches int `yaml:"multiple-switches" json:"multiple-switches"`
	SingleSwitch     int `yaml:"single-switch" json:"single-switch"`
	SameBoard        int `yaml:"same-board" json:"same-board"`
	NVLink           int `yaml:"nvlink" json:"nvlink"`
	NVSwitch         int `yaml:"nvswitch" json:"nvswitch"`
}

// DefaultWeights returns the defaults in the table of Weights.
func DefaultWeights() Weights {
	return Weights{
		System:           10,
		Node:             20,
		HostBridge:       30,
		MultipleSwitches: 40,
		SingleSwitch:     50,
		SameBoard:        60,
		NVLink:           100,
		NVSwitch:         100,
	}
}

// All yields the weights by key, in the order of the table of Weights.
func (w Weights) All() iter.Seq2[string, int] {
	return func(yield func(string, int) bool) {
		_ = yield("system", w.System) &&
			yield("node", w.Node) &&
			yield("host-bridge", w.HostBridge) &&
			yield("multiple-switches", w.MultipleSwitches) &&
			yield("single-switch", w.SingleSwitch) &&
			yield("same-board", w.SameBoard) &&
			yield("nvlink", w.NVLink) &&
			yield("nvswitch", w.NVSwitch)
	}
}

// Score returns the score of a link.
func (w Weights) Score(l gpu.Link) int {
	perNVLink := w.NVLink
	if l.Switched {
		perNVLink = w.NVSwitch
	}
	path := map[gpu.PCIePath]int{
		gpu.PathSystem:           w.System,
		gpu.PathNode:             w.Node,
		gpu.PathHostBridge:       w.HostBridge,
		gpu.PathMultipleSwitches: w.MultipleSwitches,
		gpu.PathSingleSwitch:     w.SingleSwitch,
		gpu.PathSameBoard:        w.SameBoard,
	}
	return path[l.PCIe] + l.NVLinks*perNVLink
}
