package allocator

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim"
)

func machine(t testing.TB, name string) *Node {
	t.Helper()
	m, err := sim.LoadMachine(name)
	if err != nil {
		t.Fatal(err)
	}
	n, err := NewNode(m.Snapshot(sim.DefaultDriver), DefaultWeights())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func uuids(n *Node, places ...int) []string {
	ids := make([]string, 0, len(places))
	for _, g := range places {
		ids = append(ids, n.gpus[g].UUID)
	}
	return ids
}

func all(n *Node) []string {
	ids := make([]string, 0, len(n.gpus))
	for g := range n.gpus {
		ids = append(ids, n.gpus[g].UUID)
	}
	return ids
}

func TestChoose(t *testing.T) {
	n := machine(t, "dgx1-v100")
	c, err := n.Choose(Topology, Request{Available: all(n), Size: 2})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Choice{IDs: uuids(n, 2, 3), Score: 200 + 50, Exact: true}, c); diff != "" {
		t.Error(diff)
	}
}
