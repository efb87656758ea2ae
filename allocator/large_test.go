package allocator

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// asLarge is a small node that is searched as if it had too many GPUs for a table, so that everything can be tried.
func asLarge(o *oracle) *Node {
	n := o.node()
	n.table = nil
	n.fillTree()
	n.fillKinds()
	return n
}

func setOf(places []int) set {
	var s set
	for _, g := range places {
		s.add(g)
	}
	return s
}

func (p *problem) query() query {
	q := query{available: setOf(p.available), must: setOf(p.must), size: p.size}
	q.from = q.available
	return q
}

// drawTree draws scores that follow a tree: GPUs are split at random, again and again, each time the nearer.
func drawTree(t *rapid.T, n int) *oracle {
	o := drawMatrix(t, n)
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
		nearer := score + rapid.IntRange(0, 2).Draw(t, "nearer by")
		split(gpus[:at], nearer)
		split(gpus[at:], nearer)
	}
	split(rapid.Permutation(places(n)).Draw(t, "order"), 1)
	return o
}

func places(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// withoutNext is the best set for large nodes: what the next requests could get does not count.
func (o *oracle) withoutNext(p problem) []int {
	all := p.candidates()
	slices.SortStableFunc(all, func(a, b []int) int {
		return cmp.Or(o.sum(b)-o.sum(a), o.sum(minus(p.available, b))-o.sum(minus(p.available, a)), slices.Compare(a, b))
	})
	return all[0]
}

func TestScoresOfATreeAreAnsweredExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawTree(t, upTo(t, 1, 10, "GPUs"))
		n, p := asLarge(o), drawProblem(t, len(o.score))
		if !n.tree.exact {
			t.Fatal("the scores are not seen to follow a tree")
		}
		want := o.withoutNext(p)
		if f, exact := n.searchLarge(Topology, p.query()), (found{set: setOf(want), score: o.sum(want), exact: true}); f != exact {
			t.Fatalf("%+v: %+v, want %+v", p, f, exact)
		}
	})
}

func TestTheBoundHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawMatrix(t, upTo(t, 1, 11, "GPUs"))
		n, p := asLarge(o), drawProblem(t, len(o.score))
		q := p.query()
		x, most := n.searchTree(q)
		s := n.newBranching(q, x)
		s.best = setOf(p.candidates()[0]) // whatever it begins with
		s.score = o.sum(s.best.places())
		s.steps = rapid.IntRange(0, 20).Draw(t, "steps")
		s.start(q)
		best := o.sum(o.withoutNext(p))
		switch {
		case most < best:
			t.Errorf("by the tree %d is the most, and %d can be had", most, best)
		case s.score != o.sum(s.best.places()) || !p.fulfils(s.best.places()):
			t.Errorf("%v with the score %d is no answer", s.best.places(), s.score)
		case s.score > best || max(s.score, s.open) < best:
			t.Errorf("%d was found, and at most %d could be; %d can be had", s.score, s.open, best)
		}
		// With all the steps it is the best, since there are few sets.
		if f := n.searchLarge(Topology, q); f.score != best || !f.exact {
			t.Errorf("%+v: %+v, want the score %d", p, f, best)
		}
	})
}

func TestGPUsAreAlikeThatScoreTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawMatrix(t, upTo(t, 1, 6, "GPUs"))
		n := asLarge(o)
		for a := range o.score {
			for b := range a {
				same := slices.Equal(withoutTwo(o.score[a], a, b), withoutTwo(o.score[b], a, b))
				if same != (n.kind[a] == n.kind[b]) {
					t.Errorf("of %v: that %d and %d are alike is not %v", o.score, a, b, !same)
				}
			}
		}
	})
}

// withoutTwo is a row without two of its columns.
func withoutTwo(row []int, a, b int) []int {
	return slices.Concat(row[:b], row[b+1:a], row[a+1:])
}

func TestLargeNodesTakeFewestNUMANodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawMatrix(t, upTo(t, 1, 10, "GPUs"))
		n, p := asLarge(o), drawProblem(t, len(o.score))
		if p.size == 0 {
			t.Skip("nothing is asked for")
		}
		f, want := n.searchLarge(NUMA, p.query()), o.topology(p, true)
		if x := f.set.places(); o.nodes(x) != o.nodes(want) || f.nodes != o.nodes(x) || f.score != o.sum(want) || !f.exact || !p.fulfils(x) {
			t.Errorf("%+v: %v %+v, want %v with the score %d", p, x, f, want, o.sum(want))
		}
	})
}

// However many sets of NUMA nodes there are, a request looks into maxSteps sets of GPUs in all.
func TestStepsAreSharedByNUMANodes(t *testing.T) {
	o := randomOracle(rand.New(rand.NewPCG(5, 6)), 64, 2000)
	for g := range 64 {
		o.numa[g] = g / 8
	}
	n := o.node()
	q := query{from: setOf(places(64)), size: 12} // of two of eight NUMA nodes
	q.available = q.from
	for _, steps := range []int{0, 10, 300} {
		f := n.fewestNUMANodes(q, &steps)
		if x := f.set.places(); steps != 0 || f.exact || f.bound == 0 || o.nodes(x) != 2 || len(x) != 12 || f.score != o.sum(x) {
			t.Errorf("%d steps are left, and the answer is %v, %+v", steps, x, f)
		}
	}
}

// A union that is too small must not be looked at one by one: there are more than any time allows.
func TestManyNUMANodes(t *testing.T) {
	o := &oracle{score: square[int](65), numa: make([]int, 65)}
	for g := range 65 {
		o.numa[g] = min(g, 63) // the last has two
	}
	n := o.node()
	c, err := n.Choose(NUMA, Request{Available: all(n), Size: 17})
	if err != nil {
		t.Fatal(err)
	}
	if ids := uuids(n, 63, 64); !slices.Contains(c.IDs, ids[0]) || !slices.Contains(c.IDs, ids[1]) {
		t.Errorf("%v are on 17 NUMA nodes", c.IDs)
	}
}

func TestRankIsInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawMatrix(t, upTo(t, 1, 8, "GPUs"))
		p := drawProblem(t, len(o.score))
		var want [][2]int // NUMA nodes and score
		numa := rapid.Bool().Draw(t, "numa")
		policy := map[bool]Policy{true: NUMA, false: Topology}[numa]
		kind := func(x []int) [2]int {
			if numa {
				return [2]int{o.nodes(x), o.sum(x)}
			}
			return [2]int{0, o.sum(x)}
		}
		for _, x := range p.candidates() {
			want = append(want, kind(x))
		}
		slices.SortFunc(want, func(a, b [2]int) int { return cmp.Or(a[0]-b[0], b[1]-a[1]) })
		k := rapid.IntRange(1, 6).Draw(t, "ranks")
		want = want[:min(k, len(want))]
		for name, n := range map[string]*Node{"by table": o.node(), "by parts": asLarge(o)} {
			var all []found
			if n.table == nil {
				all = runnersUp(p.query(), k, func(q query) found { return n.searchLarge(policy, q) })
			} else {
				all = n.search(policy, p.query(), k)
			}
			var got [][2]int
			seen := map[set]bool{}
			for _, f := range all {
				got = append(got, kind(f.set.places()))
				if seen[f.set] {
					t.Errorf("%s: %v is there twice", name, f.set.places())
				}
				seen[f.set] = true
			}
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s of %+v (-want +got):\n%s", policy, name, p, diff)
			}
		}
	})
}

// What is remembered of one question is no answer to another that falls to the same slot.
func TestQuestionsAreToldApart(t *testing.T) {
	asked := question{policy: Topology, query: query{size: 2}, k: 1}
	var c cache
	for i := range c.slots {
		c.slots[i].Store(&answer{asked, []found{{score: 7}}})
	}
	if got := c.get(asked); len(got) != 1 || got[0].score != 7 {
		t.Errorf("%+v is remembered", got)
	}
	for name, q := range map[string]question{
		"another policy":            {policy: NUMA, query: asked.query, k: 1},
		"other GPUs":                {policy: Topology, query: query{size: 2, from: set{1}}, k: 1},
		"another number of answers": {policy: Topology, query: asked.query, k: 3},
	} {
		if got := c.get(q); got != nil {
			t.Errorf("%s: %+v is remembered", name, got)
		}
	}
}

// The kinds of scores of a real fabric, with more GPUs than a table can hold: exact, and as fast as it has to be.
func TestAFabricOf128IsAnsweredExactly(t *testing.T) {
	n := fabric(4, 8, 16)
	rng := rand.New(rand.NewPCG(3, 4))
	for size := range 17 {
		available := rng.Perm(128)[:100]
		c, err := n.Choose(Topology, Request{Available: uuids(n, available...), Size: size})
		if err != nil {
			t.Fatal(err)
		}
		if !c.Exact || c.Bound != 0 || len(c.IDs) != size {
			t.Errorf("%d of 128: %+v", size, c)
		}
	}
	// Four of eight that are left are two of each of two switches of one NUMA node, not four of two NUMA nodes.
	c, err := n.Choose(Topology, Request{Available: uuids(n, 0, 1, 4, 5, 8, 9, 16, 17), Size: 4})
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(Choice{IDs: uuids(n, 0, 1, 4, 5), Score: 2*50 + 4*30, Exact: true}, c); diff != "" {
		t.Error(diff)
	}
}

// With few available GPUs a node that has no table gets one for them.
func TestFewOfALargeNodeAreAnsweredExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawMatrix(t, 18)
		n := o.node()
		p := drawProblem(t, len(o.score))
		some := rapid.Permutation(p.available).Draw(t, "available")
		p.available = slices.Sorted(slices.Values(some[:min(len(some), 8)]))
		p.must = slices.DeleteFunc(p.must, func(g int) bool { return !slices.Contains(p.available, g) })
		p.size = rapid.IntRange(len(p.must), len(p.available)).Draw(t, "size")
		if n.tree.exact {
			t.Skip("a tree needs no table")
		}
		check(t, n, o, p)
	})
}
