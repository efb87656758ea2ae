package peer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func all(n int) []int {
	var indices []int
	for i := range n {
		indices = append(indices, i)
	}
	return indices
}

func simulated(t testing.TB, name string) *gpu.Snapshot {
	t.Helper()
	m, err := sim.LoadMachine(name)
	testenv.Must(t, err)
	return m.Snapshot(sim.DefaultDriver)
}

// percentile returns a percentile of samples in µs.
func percentile(samples []time.Duration, p int) float64 {
	slices.Sort(samples)
	return float64(samples[(len(samples)-1)*p/100].Nanoseconds()) / 1000
}

func median(samples []time.Duration) float64 { return percentile(samples, 50) }

// figures are samples by what was measured.
type figures map[string][]time.Duration

// add measures one request.
func (f figures) measure(b *testing.B, name string, n *allocator.GPUs, p allocator.Policy, q question) {
	r := q.request(n)
	begin := time.Now()
	_, err := n.Choose(p, r)
	f[name] = append(f[name], time.Since(begin))
	testenv.Must(b, err)
}

func (f figures) report(b *testing.B) {
	for name, samples := range f {
		b.ReportMetric(median(samples), name+"-µs")
		b.ReportMetric(percentile(samples, 99), name+"-p99-µs")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkBesideThePeer compares one request with the peer's: a node with random links, all GPUs available. The node
// is new for each request, since the peer has no cache either; "again" is the same request of the same node.
func BenchmarkBesideThePeer(b *testing.B) {
	for gpus, sizes := range map[int][]int{8: {1, 2, 3, 4, 5, 6, 7, 8}, 16: {2, 3, 4}} {
		for _, size := range sizes {
			b.Run(fmt.Sprintf("%d of %d", size, gpus), func(b *testing.B) {
				random := rand.New(rand.NewPCG(uint64(gpus), uint64(size)))
				q, f := question{available: all(gpus), size: size}, figures{}
				for b.Loop() {
					s := randomNode(random, gpus)
					f.measure(b, "topology", newNode(b, s, allocator.DefaultWeights()), allocator.Topology, q)
					n := newNode(b, s, allocator.DefaultWeights())
					f.measure(b, "partition", n, allocator.Partition, q)
					f.measure(b, "again", n, allocator.Partition, q)
					devices := peerDevices(s)
					begin := time.Now()
					askPeer(devices, q)
					f["peer"] = append(f["peer"], time.Since(begin))
				}
				b.ReportMetric(median(f["peer"])/median(f["partition"]), "x-partition")
				b.ReportMetric(median(f["peer"])/median(f["topology"]), "x-topology")
				f.report(b)
			})
		}
	}
}

// BenchmarkSixteen measures requests of every size on 16 GPUs: with random links, and on a machine on which many sets
// have the same score.
func BenchmarkSixteen(b *testing.B) {
	random := rand.New(rand.NewPCG(16, 16))
	for name, node := range map[string]func() *gpu.Snapshot{
		"random links": func() *gpu.Snapshot { return randomNode(random, 16) },
		"hgx-16":       func() *gpu.Snapshot { return simulated(b, "hgx-16") },
	} {
		for size := 1; size <= 16; size++ {
			b.Run(fmt.Sprintf("%s/%d of 16", name, size), func(b *testing.B) {
				q, f := question{available: all(16), size: size}, figures{}
				for b.Loop() {
					s := node()
					f.measure(b, "topology", newNode(b, s, allocator.DefaultWeights()), allocator.Topology, q)
					n := newNode(b, s, allocator.DefaultWeights())
					f.measure(b, "partition", n, allocator.Partition, q)
					f.measure(b, "again", n, allocator.Partition, q)
				}
				f.report(b)
			})
		}
	}
}
