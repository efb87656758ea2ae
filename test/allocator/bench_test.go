package allocator

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
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
	if err != nil {
		t.Fatal(err)
	}
	return m.Snapshot("580.126.09")
}

// percentile is the time in µs that so many hundredths of the samples do not exceed.
func percentile(samples []time.Duration, hundredths int) float64 {
	slices.Sort(samples)
	return float64(samples[(len(samples)-1)*hundredths/100].Nanoseconds()) / 1000
}

func median(samples []time.Duration) float64 { return percentile(samples, 50) }

// figures has samples by what was measured.
type figures map[string][]time.Duration

// add asks once.
func (f figures) add(b *testing.B, name string, n *allocator.Node, p allocator.Policy, q question) allocator.Choice {
	r := q.request(n)
	begin := time.Now()
	c, err := n.Choose(p, r)
	f[name] = append(f[name], time.Since(begin))
	if err != nil {
		b.Fatal(err)
	}
	return c
}

func (f figures) report(b *testing.B) {
	for name, samples := range f {
		b.ReportMetric(median(samples), name+"-µs")
		b.ReportMetric(percentile(samples, 99), name+"-p99-µs")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkBesideThePeer is the policy's part of P2: one request of a node whose GPUs are linked at random and all
// available. A policy that was not asked before is cold, as every request is with the peer; "again" is the same request
// of the same node.
func BenchmarkBesideThePeer(b *testing.B) {
	for gpus, sizes := range map[int][]int{8: {1, 2, 3, 4, 5, 6, 7, 8}, 16: {2, 3, 4}} {
		for _, size := range sizes {
			b.Run(fmt.Sprintf("%d of %d", size, gpus), func(b *testing.B) {
				random := rand.New(rand.NewPCG(uint64(gpus), uint64(size)))
				q, f := question{available: all(gpus), size: size}, figures{}
				for b.Loop() {
					s := randomNode(random, gpus)
					f.add(b, "topology", newNode(b, s, allocator.DefaultWeights()), allocator.Topology, q)
					n := newNode(b, s, allocator.DefaultWeights())
					f.add(b, "partition", n, allocator.Partition, q)
					f.add(b, "again", n, allocator.Partition, q)
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

// BenchmarkSixteen is every size of 16 GPUs, where the links are random, and where they are those of a machine on which
// many sets are equal.
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
					f.add(b, "topology", newNode(b, s, allocator.DefaultWeights()), allocator.Topology, q)
					n := newNode(b, s, allocator.DefaultWeights())
					f.add(b, "partition", n, allocator.Partition, q)
					f.add(b, "again", n, allocator.Partition, q)
				}
				f.report(b)
			})
		}
	}
}
