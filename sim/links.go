package sim

import (
	"fmt"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// maxNVLinks is NVML_NVLINK_MAX_LINKS.
const maxNVLinks = 18

// buildPairs derives the PCIe path of each pair of GPUs from their upstream bridges.
func (b *builder) buildPairs() {
	gpus := b.machine.GPUs
	for i := range gpus {
		for j := i + 1; j < len(gpus); j++ {
			b.machine.Pairs = append(b.machine.Pairs, Pair{A: i, B: j, PCIe: pciePath(&gpus[i], &gpus[j])})
		}
	}
}

func pciePath(a, b *GPU) gpu.PCIePath {
	shared := 0
	for shared < min(len(a.Upstream), len(b.Upstream)) && a.Upstream[shared] == b.Upstream[shared] {
		shared++
	}
	switch {
	case shared == 0 && a.NUMANode != b.NUMANode:
		return gpu.PathSystem
	case shared == 0:
		return gpu.PathNode
	case shared == 1:
		return gpu.PathHostBridge
	case shared == len(a.Upstream) && shared == len(b.Upstream):
		return gpu.PathSingleSwitch
	default:
		return gpu.PathMultipleSwitches
	}
}

// buildNVLinks creates the NVLinks to the switches, or between the GPUs of the matrix.
func (b *builder) buildNVLinks() {
	f := b.file.NVLink
	switch {
	case f == nil:
		return
	case f.Version < 1 || f.Version > 6 || f.Speed < 1:
		b.addProblem("nvlink", "want a version from 1 to 6 and a speed in MB/s")
	case len(f.Switches) > 0 && len(f.Matrix) > 0:
		b.addProblem("nvlink", "want either switches or a matrix, not both")
	case len(f.Switches) > 0:
		b.switchLinks(f)
	default:
		b.directLinks(f)
	}
}

// switchLinks distributes each GPU's links over the switches. If there are several groups of switches, as on a machine
// with two boards, each group serves the same number of consecutive GPUs.
func (b *builder) switchLinks(f *nvlinkFile) {
	gpus := b.machine.GPUs
	if f.PerGPU < 1 || f.PerGPU > maxNVLinks {
		b.addProblem("nvlink.perGPU", "a GPU has 1 to %d links, not %d", maxNVLinks, f.PerGPU)
		return
	}
	if len(gpus)%len(f.Switches) != 0 {
		b.addProblem("nvlink.switches", "%d GPUs cannot be divided among %d groups of switches", len(gpus),
			len(f.Switches))
		return
	}
	for i, group := range f.Switches {
		if len(group) == 0 {
			b.addProblem(fmt.Sprintf("nvlink.switches.%d", i), "the group is empty")
			return
		}
		b.addSwitches(i, group)
	}
	perGroup := len(gpus) / len(f.Switches)
	for i := range gpus {
		group := f.Switches[i/perGroup]
		for port := range f.PerGPU {
			gpus[i].NVLinks = append(gpus[i].NVLinks, NVLink{
				Port: port, Remote: group[port%len(group)], Switch: true, Version: f.Version, SpeedMBps: f.Speed,
			})
		}
	}
}

func (b *builder) addSwitches(i int, group []string) {
	for j, bus := range group {
		path := fmt.Sprintf("nvlink.switches.%d.%d", i, j)
		if !busPattern.MatchString(bus) {
			b.addProblem(path, "%q is not a PCI address such as 0000:05:00.0", bus)
		}
		if slices.Contains(b.machine.NVSwitches, bus) ||
			slices.ContainsFunc(b.machine.GPUs, func(g GPU) bool { return g.Bus == bus }) {
			b.addProblem(path, "the address %s occurs twice", bus)
		}
		b.machine.NVSwitches = append(b.machine.NVSwitches, bus)
	}
}

func (b *builder) directLinks(f *nvlinkFile) {
	if !b.checkMatrix(f.Matrix) {
		return
	}
	gpus := b.machine.GPUs
	for i, row := range f.Matrix {
		for j, count := range row {
			for range count {
				gpus[i].NVLinks = append(gpus[i].NVLinks, NVLink{
					Port: len(gpus[i].NVLinks), Remote: gpus[j].Bus, Version: f.Version, SpeedMBps: f.Speed,
				})
			}
		}
	}
}

// checkMatrix reports whether the matrix is square, symmetric, within the limits, and without links of a GPU to itself.
func (b *builder) checkMatrix(matrix [][]int) bool {
	n := len(b.machine.GPUs)
	if len(matrix) != n {
		b.addProblem("nvlink.matrix", "want %d rows, one for each GPU, not %d", n, len(matrix))
		return false
	}
	before := len(b.problems)
	for i, row := range matrix {
		if len(row) != n {
			b.addProblem(fmt.Sprintf("nvlink.matrix.%d", i), "want %d numbers, not %d", n, len(row))
		}
	}
	for i := 0; i < n && len(b.problems) == before; i++ {
		b.checkRow(matrix, i)
	}
	return len(b.problems) == before
}

func (b *builder) checkRow(matrix [][]int, i int) {
	sum := 0
	for j, count := range matrix[i] {
		path := fmt.Sprintf("nvlink.matrix.%d.%d", i, j)
		switch {
		case count < 0 || count > maxNVLinks:
			b.addProblem(path, "a pair has 0 to %d links, not %d", maxNVLinks, count)
		case i == j && count != 0:
			b.addProblem(path, "a GPU has no links to itself")
		case count != matrix[j][i]:
			b.addProblem(path, "GPU %d has %d links to GPU %d, which has %d to it", i, count, j, matrix[j][i])
		}
		sum += count
	}
	if sum > maxNVLinks {
		b.addProblem(fmt.Sprintf("nvlink.matrix.%d", i), "a GPU has at most %d links, not %d", maxNVLinks, sum)
	}
}
