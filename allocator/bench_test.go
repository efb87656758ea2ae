package allocator

import (
	"fmt"
	"testing"
)

// fabric is a node of PCIe switches: GPUs of one switch, of one NUMA node and of one half of the node are ever further.
func fabric(perSwitch, perNode, nodes int) *Node {
	count := perNode * nodes
	o := &oracle{score: make([][]int, count), numa: make([]int, count)}
	for a := range count {
		o.score[a] = make([]int, count)
		o.numa[a] = a / perNode
		for b := range a {
			s := 10
			switch {
			case a/perSwitch == b/perSwitch:
				s = 50
			case a/perNode == b/perNode:
				s = 30
			}
			o.score[a][b], o.score[b][a] = s, s
		}
	}
	return o.node()
}

// cold answers as if the question were new.
func cold(n *Node, p Policy, q query) found { return n.search(p, q, 1)[0] }

func BenchmarkChoose(b *testing.B) {
	for _, c := range []struct {
		name  string
		node  *Node
		sizes []int
	}{
		{"dgx1-v100", machine(b, "dgx1-v100"), []int{1, 2, 4, 8}},
		{"dgx-h100", machine(b, "dgx-h100"), []int{1, 2, 4, 8}},
		{"hgx-16", machine(b, "hgx-16"), []int{1, 2, 3, 4, 5, 6, 7, 8, 12, 16}},
		{"fabric-128", fabric(4, 8, 16), []int{1, 2, 4, 8, 15, 16}},
	} {
		for _, policy := range []Policy{Topology, Partition, NUMA} {
			for _, size := range c.sizes {
				r := Request{Available: all(c.node), Size: size}
				q, err := c.node.whole.resolve(r)
				if err != nil {
					b.Fatal(err)
				}
				b.Run(fmt.Sprintf("%s/%s/%d/cold", c.name, policy, size), func(b *testing.B) {
					for b.Loop() {
						cold(c.node, policy, c.node.whole.query(q))
					}
				})
			}
		}
		b.Run(c.name+"/topology/2/remembered", func(b *testing.B) {
			r := Request{Available: all(c.node), Size: 2}
			for b.Loop() {
				if _, err := c.node.Choose(Topology, r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPackMIG has seven MIG devices on each of 16 GPUs: with half of them asked for, most sets of GPUs are looked at.
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

func BenchmarkNewNode(b *testing.B) {
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
