package allocator

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/gpu"
)

// largeNode returns a node that is searched as if it had too many GPUs for a table. So the oracle can check it.
func largeNode(o *oracle) *GPUs {
	n := o.node()
	n.table, n.pairs = nil, sortedPairs(n.score)
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

// drawTree draws scores that follow a tree: it splits the GPUs at random, again and again, with ever higher scores.
func drawTree(t *rapid.T, n int) *oracle {
	o := drawOracle(t, n)
	var split func(gpus []int, score int)
	split = func(gpus []int, score int) {
		if len(gpus) < 2 {
			return
		}
		at := rapid.IntRange(1, len(gpus)-1).Draw(t, "split")
		for _, a := range gpus[:at] {
			for _, b := range gpus[at:] {
				o.score[a][b], o.score[b][a] = score, score
			}
		}
		higher := score + rapid.IntRange(0, 2).Draw(t, "higher by")
		split(gpus[:at], higher)
		split(gpus[at:], higher)
	}
	split(rapid.Permutation(allIndices(n)).Draw(t, "order"), 1)
	return o
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

func TestLargeNodeWithTreeIsAnsweredExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawTree(t, upTo(t, 1, 10, "GPUs"))
		n, p := largeNode(o), drawProblem(t, len(o.score))
		want := o.withoutNext(p)
		wantFound := found{set: setOf(want), score: o.sum(want), next: -1, exact: true}
		for _, g := range want {
			wantFound.cost += n.scoreWith(setOf(p.available), g)
		}
		if f := n.search(Topology, p.query()); f != wantFound {
			t.Fatalf("%+v: %+v, want %+v", p, f, wantFound)
		}
	})
}

// Where the scores follow no tree, the answer is valid, the best score is within the bound, and a pair is the best.
func TestLargeNodeWithoutTreeIsAnsweredWithinTheBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawOracle(t, upTo(t, 1, 11, "GPUs"))
		n, p := largeNode(o), drawProblem(t, len(o.score))
		policy := rapid.SampledFrom([]Policy{Topology, NUMA}).Draw(t, "policy")
		f, want := n.search(policy, p.query()), o.topology(p, policy == NUMA)
		x, best := f.set.members(), o.sum(want)
		switch {
		case !p.fulfils(x) || f.score != o.sum(x) || policy == NUMA && o.nodes(x) != o.nodes(want):
			t.Errorf("%s, %+v: %v with the score %d is no answer", policy, p, x, f.score)
		case f.score > best || f.score+f.bound < best || f.exact != (f.bound == 0):
			t.Errorf("%s, %+v: the best score is %d, and the answer %+v", policy, p, best, f)
		}
		if policy == Topology && p.size == 2 && f.score != best {
			t.Errorf("%+v: the pair scores %d, the best %d", p, f.score, best)
		}
	})
}

func TestLargeNodeUsesFewestNUMANodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawTree(t, upTo(t, 1, 10, "GPUs"))
		for g := range o.numa {
			o.numa[g] = rapid.IntRange(gpu.NoNUMANode, 3).Draw(t, "NUMA node")
		}
		n, p := largeNode(o), drawProblem(t, len(o.score))
		if p.size == 0 {
			t.Skip("no GPU is requested")
		}
		f, want := n.search(NUMA, p.query()), o.topology(p, true)
		x := f.set.members()
		if o.nodes(x) != o.nodes(want) || f.numaNodes != o.nodes(x) || f.score != o.sum(want) || !f.exact || !p.fulfils(x) {
			t.Errorf("%+v: %v %+v, want %v with the score %d", p, x, f, want, o.sum(want))
		}
	})
}

// There are too many sets of 16 of 64 NUMA nodes to try each. Those that are too small must not be tried.
func TestLargeNodeWithManyNUMANodes(t *testing.T) {
	o := newOracle(65)
	for g := range o.numa {
		o.numa[g] = min(g, 63) // the last has two GPUs
	}
	n := o.node()
	c, err := n.Choose(NUMA, Request{Available: n.UUIDs(), Size: 17})
	if err != nil {
		t.Fatal(err)
	}
	if ids := uuids(n, 63, 64); !slices.Contains(c.IDs, ids[0]) || !slices.Contains(c.IDs, ids[1]) {
		t.Errorf("%v are on 17 NUMA nodes", c.IDs)
	}
}

// If not all sets of NUMA nodes are tried, the bound covers those too.
func TestLargeNodeBoundsUntriedNUMANodes(t *testing.T) {
	o := newOracle(64).withScores(func(a, b int) int { return a * b % 7 })
	for g := range o.numa {
		o.numa[g] = g / 2
	}
	n := o.node()
	f := n.search(NUMA, query{available: setOf(allIndices(64)), from: setOf(allIndices(64)), size: 8})
	best := n.search(Topology, query{available: setOf(allIndices(64)), from: setOf(allIndices(64)), size: 8})
	if f.numaNodes != 4 || f.exact || f.score+f.bound < best.score {
		t.Errorf("%+v; on any NUMA nodes %+v", f, best)
	}
}

func TestRankReturnsTheBestSetsInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawTree(t, upTo(t, 1, 8, "GPUs"))
		for g := range o.numa {
			o.numa[g] = rapid.IntRange(gpu.NoNUMANode, 3).Draw(t, "NUMA node")
		}
		p := drawProblem(t, len(o.score))
		policy := rapid.SampledFrom([]Policy{Topology, NUMA}).Draw(t, "policy")
		merit := func(x []int) [2]int { // NUMA nodes and score
			if policy == NUMA {
				return [2]int{o.nodes(x), o.sum(x)}
			}
			return [2]int{0, o.sum(x)}
		}
		var want [][2]int
		for _, x := range p.candidates() {
			want = append(want, merit(x))
		}
		slices.SortFunc(want, func(a, b [2]int) int { return cmp.Or(a[0]-b[0], b[1]-a[1]) })
		k := rapid.IntRange(1, 6).Draw(t, "ranks")
		want = want[:min(k, len(want))]
		for name, n := range map[string]*GPUs{"small": o.node(), "large": largeNode(o)} {
			var got [][2]int
			seen := map[set]bool{}
			for _, f := range n.rank(policy, p.query(), k) {
				got = append(got, merit(f.set.members()))
				if seen[f.set] {
					t.Errorf("%s node: %v is listed twice", name, f.set.members())
				}
				seen[f.set] = true
			}
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("%s node, %s of %+v (-want +got):\n%s", name, policy, p, diff)
			}
		}
	})
}

func TestPCIeFabricOf128IsAnsweredExactly(t *testing.T) {
	n := fabric(4, 8, 16)
	rng := rand.New(rand.NewPCG(3, 4))
	for size := range 17 {
		c, err := n.Choose(Topology, Request{Available: uuids(n, rng.Perm(128)[:100]...), Size: size})
		if err != nil {
			t.Fatal(err)
		}
		if !c.Exact || c.Bound != 0 || len(c.IDs) != size {
			t.Errorf("%d of 128: %+v", size, c)
		}
	}
	// The best four are two each of two switches of one NUMA node, not four of two NUMA nodes.
	c, err := n.Choose(Topology, Request{Available: uuids(n, 0, 1, 4, 5, 8, 9, 16, 17), Size: 4})
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(Choice{
		IDs: uuids(n, 0, 1, 4, 5), Score: 2*50 + 4*30, Next: -1, LeftScore: 2*50 + 4*10, Exact: true,
	}, c); diff != "" {
		t.Errorf("choice (-want +got):\n%s", diff)
	}
}
