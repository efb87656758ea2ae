package allocator

import (
	"fmt"
	"testing"
)

// fabric returns a node with PCIe switches, all of the same size.
func fabric(perSwitch, perNode, nodes int) *GPUs {
	o := newOracle(perNode * nodes).withScores(func(a, b int) int {
		switch {
		case a/perSwitch == b/perSwitch:
			return 50
		case a/perNode == b/perNode:
			return 30
		default:
			return 10
		}
	})
	for g := range o.numa {
		o.numa[g] = g / perNode
	}
	return o.node()
}

func BenchmarkChoose(b *testing.B) {
	for _, c := range []struct {
		name  string
		node  *GPUs
		sizes []int
	}{
		{"dgx1-v100", machine(b, "dgx1-v100"), []int{1, 2, 4, 8}},
		{"dgx-h100", machine(b, "dgx-h100"), []int{1, 2, 4, 8}},
		{"hgx-16", machine(b, "hgx-16"), []int{1, 2, 3, 4, 5, 6, 7, 8, 12, 16}},
		{"fabric-128", fabric(4, 8, 16), []int{1, 2, 4, 8, 15, 16}},
	} {
		for _, policy := range []Policy{Topology, Partition, NUMA} {
			for _, size := range c.sizes {
				r := Request{Available: c.node.UUIDs(), Size: size}
				b.Run(fmt.Sprintf("%s/%s/%d", c.name, policy, size), func(b *testing.B) {
					for b.Loop() {
						if _, err := c.node.Choose(policy, r); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// BenchmarkPackMIG packs seven MIG devices on each of 16 GPUs. A request for half of them compares the most sets of
// GPUs.
func BenchmarkPackMIG(b *testing.B) {
	p, ids := migDevices(machine(b, "hgx-16"))
	for _, size := range []int{1, 7, 56, 105} {
		b.Run(fmt.Sprintf("%d of %d", size, len(ids)), func(b *testing.B) {
			for b.Loop() {
				if _, err := p.Choose(Pack, Request{Available: ids, Size: size}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkNewGPUs(b *testing.B) {
	for _, name := range []string{"dgx-h100", "hgx-16"} {
		o := oracleOf(machine(b, name))
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				o.node()
			}
		})
	}
	b.Run("fabric-128", func(b *testing.B) {
		for b.Loop() {
			fabric(4, 8, 16)
		}
	})
}
