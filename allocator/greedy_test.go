package allocator

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// largeNode returns a node that is searched as if it had too many GPUs for a table. So the oracle can check it.
func largeNode(o *oracle) *GPUs {
	n := o.node()
	n.table = nil
	return n
}

func setOf(gpus []int) set {
	var s set
	for _, g := range gpus {
		s.add(g)
	}
	return s
}

func (p *problem) query() query {
	q := query{available: setOf(p.available), must: setOf(p.must), size: p.size}
	q.from = q.available
	return q
}

// withoutNext returns the best set by Topology without L, as on large nodes.
func (o *oracle) withoutNext(p problem) []int {
	all := p.candidates()
	slices.SortStableFunc(all, func(a, b []int) int {
		left := func(x []int) int { return o.sum(minus(p.available, x)) }
		return cmp.Or(o.sum(b)-o.sum(a), left(b)-left(a), slices.Compare(a, b))
	})
	return all[0]
}

func TestLargeNodeGetsTheBestSetOfUpToTwo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawOracle(t, upTo(t, 1, 11, "GPUs"))
		n, p := largeNode(o), drawProblem(t, len(o.score))
		p.size = min(p.size, 2)
		p.must = p.must[:min(len(p.must), p.size)]
		if diff := gocmp.Diff(setOf(o.withoutNext(p)), n.search(Topology, p.query())); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", p, diff)
		}
	})
}

func TestLargeNodeUsesFewestNUMANodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawOracle(t, upTo(t, 1, 11, "GPUs"))
		n, p := largeNode(o), drawProblem(t, len(o.score))
		x := n.search(NUMA, p.query()).members()
		if want := o.nodes(o.topology(p, true)); !p.fulfils(x) || o.nodes(x) != want {
			t.Errorf("%+v: %v of %v, want %d NUMA nodes", p, x, o.numa, want)
		}
	})
}

func TestLargeNodeAnswersAnyRequest(t *testing.T) {
	n, rng := fabric(4, 8, 16), rand.New(rand.NewPCG(3, 4))
	for size := range 129 {
		for _, policy := range Policies() {
			available := uuids(n, rng.Perm(128)[:size+rng.IntN(129-size)]...)
			c, err := n.Choose(Policy(policy), Request{Available: available, Size: size})
			testenv.Must(t, err)
			foreign := func(id string) bool { return !slices.Contains(available, id) }
			if len(c.IDs) != size || slices.ContainsFunc(c.IDs, foreign) {
				t.Errorf("%s, %d of %v: %+v", policy, size, available, c)
			}
		}
	}
}

func TestLargeNodePrefersNearGPUs(t *testing.T) {
	n := fabric(4, 8, 16)
	for name, c := range map[string]struct {
		available []int
		want      []int
		score     int
	}{
		"four of one switch":                    {[]int{0, 1, 8, 9, 10, 11, 16}, []int{8, 9, 10, 11}, 6 * 50},
		"two of two switches of one NUMA node":  {[]int{0, 8, 9, 16, 17, 20, 21}, []int{16, 17, 20, 21}, 2*50 + 4*30},
		"three of a switch and one of the next": {[]int{0, 8, 9, 10, 12, 24}, []int{8, 9, 10, 12}, 3*50 + 3*30},
	} {
		t.Run(name, func(t *testing.T) {
			choice, err := n.Choose(Topology, Request{Available: uuids(n, c.available...), Size: 4})
			testenv.Must(t, err)
			if diff := gocmp.Diff(Choice{IDs: uuids(n, c.want...), Score: c.score}, choice); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
