package allocator

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
)

const (
	fabricGPUs = 128
	perSwitch  = 4  // GPUs
	perBridge  = 8  // GPUs: two switches
	perSocket  = 16 // GPUs: two host bridges
)

// fabric is a machine of 128 GPUs on PCIe switches, eight sockets. With cubes, each sixteen that are on one socket are two
// hybrid cube meshes of NVLinks, as a DGX-1V has one; the scores are then not those of a tree.
func fabric(cubes bool) *gpu.Snapshot {
	s := &gpu.Snapshot{}
	for a := range fabricGPUs {
		s.Devices = append(s.Devices, gpu.Device{Index: a, UUID: uuid(a), NUMANode: a / perSocket})
		for b := a + 1; b < fabricGPUs; b++ {
			l := gpu.Link{A: a, B: b, PCIe: fabricPath(a, b)}
			if cubes && a/8 == b/8 {
				l.NVLinks = cube[a%8][b%8]
			}
			s.Links = append(s.Links, l)
		}
	}
	return s
}

func fabricPath(a, b int) gpu.PCIePath {
	switch {
	case a/perSwitch == b/perSwitch:
		return gpu.PathSingleSwitch
	case a/perBridge == b/perBridge:
		return gpu.PathHostBridge
	case a/perSocket == b/perSocket:
		return gpu.PathNode
	default:
		return gpu.PathSystem
	}
}

// cube has the NVLinks of a DGX-1V (NVIDIA DGX-1 With Tesla V100 System Architecture, WP-08437).
var cube = [8][8]int{
	{0, 1, 1, 2, 2, 0, 0, 0},
	{1, 0, 2, 1, 0, 2, 0, 0},
	{1, 2, 0, 2, 0, 0, 1, 0},
	{2, 1, 2, 0, 0, 0, 0, 1},
	{2, 0, 0, 0, 0, 1, 1, 2},
	{0, 2, 0, 0, 1, 0, 2, 1},
	{0, 0, 1, 0, 1, 2, 0, 2},
	{0, 0, 0, 1, 2, 1, 2, 0},
}

// BenchmarkFabric is a request of a machine of 128 GPUs, some of which are in use, for each size up to 16. The bound is how
// much more than the answer's the best score can be at most, of which "score" is the answer's; 0 is proof that it is best.
func BenchmarkFabric(b *testing.B) {
	for name, s := range map[string]*gpu.Snapshot{"PCIe": fabric(false), "cube meshes": fabric(true)} {
		n := newNode(b, s, allocator.DefaultWeights())
		for _, policy := range []allocator.Policy{allocator.Topology, allocator.Partition} {
			for size := 1; size <= 16; size++ {
				b.Run(fmt.Sprintf("%s/%s/%d of 128", name, policy, size), func(b *testing.B) {
					benchmarkFabric(b, n, policy, size)
				})
			}
		}
	}
}

func benchmarkFabric(b *testing.B, n *allocator.Node, policy allocator.Policy, size int) {
	random := rand.New(rand.NewPCG(128, uint64(size)))
	f := figures{}
	score, bound, share := 0, 0, 0.0
	for b.Loop() {
		q := question{available: random.Perm(fabricGPUs)[:size+random.IntN(fabricGPUs-size+1)], size: size}
		c := f.add(b, "request", n, policy, q)
		if of := float64(c.Bound) / float64(max(c.Score, 1)); of > share {
			score, bound, share = c.Score, c.Bound, of
		}
	}
	b.ReportMetric(float64(bound), "worst-bound")
	b.ReportMetric(float64(score), "its-score")
	f.report(b)
}
