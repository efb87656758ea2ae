package allocator

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
)

// fabric is the generated machine of 128 GPUs on PCIe switches. With cubes, each eight of them are a hybrid cube mesh of
// NVLinks, as a DGX-1V is; their scores are then not those of a tree.
func fabric(t testing.TB, cubes bool) *gpu.Snapshot {
	t.Helper()
	s := simulated(t, "pcie-fabric-128")
	for i := range s.Links {
		if l := &s.Links[i]; cubes && l.A/8 == l.B/8 {
			l.NVLinks = cube[l.A%8][l.B%8]
		}
	}
	return s
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
	for name, s := range map[string]*gpu.Snapshot{"PCIe": fabric(b, false), "cube meshes": fabric(b, true)} {
		n := newNode(b, s, allocator.DefaultWeights())
		for _, policy := range []allocator.Policy{allocator.Topology, allocator.NUMA} {
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
		q := question{available: random.Perm(128)[:size+random.IntN(128-size+1)], size: size}
		c := f.add(b, "request", n, policy, q)
		if of := float64(c.Bound) / float64(max(c.Score, 1)); of > share {
			score, bound, share = c.Score, c.Bound, of
		}
	}
	b.ReportMetric(float64(bound), "worst-bound")
	b.ReportMetric(float64(score), "its-score")
	f.report(b)
}
