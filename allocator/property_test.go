package allocator

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/sim"
)

// 1,000 checks of each property find any fault that was made on purpose; rapid's default is 100.
func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", "1000"); err != nil {
		panic(err)
	}
	flag.Parse()
	m.Run()
}

// check compares the answers of the policies for whole GPUs with the oracle's.
func check(t rapid.TB, n *GPUs, o *oracle, p problem) {
	t.Helper()
	for policy, want := range map[Policy][]int{
		Topology:  o.topology(p, false),
		NUMA:      o.topology(p, true),
		Partition: o.partition(p),
	} {
		c, err := n.Choose(policy, p.request(n))
		if err != nil {
			t.Fatalf("%s %+v: %v", policy, p, err)
		}
		wantChoice := Choice{IDs: uuids(n, want...), Score: o.sum(want)}
		if diff := cmp.Diff(wantChoice, c); diff != "" {
			t.Fatalf("%s %+v: want %v (-want +got):\n%s", policy, p, want, diff)
		}
	}
}

func TestAnswersAreTheBestOnRandomNodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawOracle(t, upTo(t, 0, 9, "GPUs"))
		check(t, o.node(), o, drawProblem(t, len(o.score)))
	})
}

func TestTopologyIsTheBestOnLargerRandomNodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawOracle(t, upTo(t, 10, 12, "GPUs"))
		n, p := o.node(), drawProblem(t, len(o.score))
		for policy, numa := range map[Policy]bool{Topology: false, NUMA: true} {
			c, err := n.Choose(policy, p.request(n))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(uuids(n, o.topology(p, numa)...), c.IDs); diff != "" {
				t.Fatalf("%s %+v (-want +got):\n%s", policy, p, diff)
			}
		}
	})
}

func TestAnswersAreTheBestOnMachines(t *testing.T) {
	for _, name := range sim.Machines() {
		n := machine(t, name)
		if len(n.list) > 8 { // the oracle takes too long: see TestTopologyIsTheBestOf16
			continue
		}
		t.Run(name, func(t *testing.T) {
			o := oracleOf(n)
			rapid.Check(t, func(t *rapid.T) { check(t, n, o, drawProblem(t, len(n.list))) })
		})
	}
}

// Of 16 GPUs too the answer is the best, with the links of a machine, random ones, and three different scores, with
// which many sets are equal.
func TestTopologyIsTheBestOf16(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for name, o := range map[string]*oracle{
		"hgx-16":                 oracleOf(machine(t, "hgx-16")),
		"random scores":          randomOracle(rng, 16, 2000),
		"three different scores": randomOracle(rng, 16, 3),
	} {
		n, exact := o.node(), newBitOracle(o)
		for size := range 17 * 3 {
			size %= 17
			p := problem{available: rng.Perm(16)[:size+rng.IntN(17-size)], size: size}
			p.must = slices.Clone(p.available[:size/4*rng.IntN(2)])
			slices.Sort(p.available)
			c, err := n.Choose(Topology, p.request(n))
			if err != nil {
				t.Fatal(err)
			}
			want := exact.best(bitsOf(p.available), bitsOf(p.must), size)
			wantChoice := Choice{IDs: uuids(n, indicesOf(want)...), Score: exact.score[want]}
			if diff := cmp.Diff(wantChoice, c); diff != "" {
				t.Errorf("%s, %+v (-want +got):\n%s", name, p, diff)
			}
		}
	}
}
