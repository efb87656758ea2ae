package allocator

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func machine(t testing.TB, name string) *GPUs {
	t.Helper()
	m, err := sim.LoadMachine(name)
	testenv.Must(t, err)
	n, err := NewGPUs(m.Snapshot(sim.DefaultDriver), DefaultWeights())
	testenv.Must(t, err)
	return n
}

func uuids(n *GPUs, gpus ...int) []string {
	ids := make([]string, 0, len(gpus))
	for _, g := range gpus {
		ids = append(ids, n.list[g].uuid)
	}
	return ids
}

// islands returns a node of two islands of four GPUs each, with NVLinks between the GPUs of an island.
func islands() *GPUs {
	return newOracle(8).withScores(func(a, b int) int {
		if a/4 == b/4 {
			return 1210
		}
		return 10
	}).node()
}

func TestRequestsLeaveIslandsWhole(t *testing.T) {
	two, mesh, quad := islands(), machine(t, "dgx1-v100"), machine(t, "pcie-quad")
	cases := map[string]struct {
		node  *GPUs
		sizes []int
		want  [][]int
	}{
		"single GPUs come from one island": {two, []int{1, 1, 1, 1, 4}, [][]int{{0}, {1}, {2}, {3}, {4, 5, 6, 7}}},
		"pairs come from one island":       {two, []int{2, 2, 4}, [][]int{{0, 1}, {2, 3}, {4, 5, 6, 7}}},
		"a GPU comes from a broken island": {two, []int{2, 1, 4, 1}, [][]int{{0, 1}, {2}, {4, 5, 6, 7}, {3}}},
		"one half of the mesh stays whole": {mesh, []int{1, 2, 4, 1}, [][]int{{0}, {2, 3}, {4, 5, 6, 7}, {1}}},
		"pairs have 2 NVLinks, 1 switch":   {mesh, []int{2, 2, 2, 2}, [][]int{{2, 3}, {6, 7}, {0, 4}, {1, 5}}},
		"a pair has the only switch":       {quad, []int{2, 1, 1}, [][]int{{2, 3}, {0}, {1}}},
		"single GPUs leave the best pair":  {quad, []int{1, 1, 2}, [][]int{{0}, {1}, {2, 3}}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			free := allIndices(len(c.node.list))
			var got [][]int
			for _, size := range c.sizes {
				choice, err := c.node.Choose(Topology, Request{Available: uuids(c.node, free...), Size: size})
				testenv.Must(t, err)
				var x []int
				for _, id := range choice.IDs {
					x = append(x, c.node.index[id])
				}
				got, free = append(got, x), minus(free, x)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// On every machine with two halves, small requests leave one half whole as long as the other has room. In the cube mesh
// the best second pair is in the other half.
func TestSmallRequestsLeaveAHalfWhole(t *testing.T) {
	for _, name := range []string{"dgx1-v100", "dgx-h100", "dgx-a100", "hgx-16"} {
		n := machine(t, name)
		half := len(n.list) / 2
		best := oracleOf(n).bestOf(allIndices(len(n.list)), half)
		for _, sizes := range [][]int{{1, 1, 2}, {2, 2}, {1, 2, 1}, {2, 1, 1}} {
			if name == "dgx1-v100" && len(sizes) == 2 {
				continue
			}
			free := n.UUIDs()
			for _, size := range sizes {
				c, err := n.Choose(Topology, Request{Available: free, Size: size})
				testenv.Must(t, err)
				free = slices.DeleteFunc(free, func(id string) bool { return slices.Contains(c.IDs, id) })
			}
			c, err := n.Choose(Topology, Request{Available: free, Size: half})
			testenv.Must(t, err)
			if c.Score != best {
				t.Errorf("%s: after requests of %v, %d GPUs score %d of %d", name, sizes, half, c.Score, best)
			}
		}
	}
}

func TestScoreDoesNotDependOnTheOrderOfGPUs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawOracle(t, upTo(t, 1, 12, "GPUs"))
		p := drawProblem(t, len(o.score))
		order := rapid.Permutation(allIndices(len(o.score))).Draw(t, "order")
		other := newOracle(len(order))
		for a := range order {
			other.numa[order[a]] = o.numa[a]
			for b := range order {
				other.score[order[a]][order[b]] = o.score[a][b]
			}
		}
		moved := func(gpus []int) []int {
			var to []int
			for _, g := range gpus {
				to = append(to, order[g])
			}
			return to
		}
		q := problem{available: moved(p.available), must: moved(p.must), size: p.size}
		n, m := o.node(), other.node()
		for _, policy := range []Policy{Topology, NUMA} { // Partition takes the first of equal partitions
			a, errA := n.Choose(policy, p.request(n))
			b, errB := m.Choose(policy, q.request(m))
			if errA != nil || errB != nil || a.Score != b.Score {
				t.Errorf("%s: %+v, %v; in another order %+v, %v", policy, a, errA, b, errB)
			}
		}
	})
}

func TestConcurrentRequests(t *testing.T) {
	n := machine(t, "hgx-16")
	want := map[int]Choice{}
	for size := range 9 {
		c, err := n.Choose(Partition, Request{Available: n.UUIDs(), Size: size})
		testenv.Must(t, err)
		want[size] = c
	}
	n = machine(t, "hgx-16")
	var callers sync.WaitGroup
	for caller := range 8 {
		callers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(caller), 0))
			for range 50 {
				size := rng.IntN(9)
				c, err := n.Choose(Partition, Request{Available: n.UUIDs(), Size: size})
				if diff := cmp.Diff(want[size], c); diff != "" || err != nil {
					t.Errorf("%d: %v\n%s", size, err, diff)
				}
			}
		})
	}
	callers.Wait()
}

func TestRequestsWithoutAnswer(t *testing.T) {
	n := islands()
	devices := slices.Clone(n.whole.devices)
	devices[1].Unusable = true
	devices[2].Parent = "GPU-lost"
	p := NewPool(n, devices)
	id := func(gpus ...int) []string { return uuids(n, gpus...) }
	long := strings.Repeat("x", 1000)
	cases := map[string]struct {
		r      Request
		reason Reason
		ids    []string
		text   string
	}{
		"an unknown device": {
			Request{Available: []string{"GPU-0", "?"}, Size: 1},
			Unknown,
			[]string{"?"},
			`no such device: "?"`,
		},
		"an unknown one included": {
			Request{Available: id(0), Must: []string{"?"}, Size: 1},
			Unknown,
			[]string{"?"},
			`no such device: "?"`,
		},
		"a very long ID": {
			Request{Available: []string{long}},
			Unknown,
			[]string{long},
			`no such device: "` + long[:80] + `"`,
		},
		"a device twice": {Request{Available: id(0, 0), Size: 1}, Twice, id(0), `listed twice: "GPU-0"`},
		"one included twice": {
			Request{Available: id(0, 3), Must: id(0, 0), Size: 2},
			Twice, id(0),
			`listed twice: "GPU-0"`,
		},
		"included, but not available": {
			Request{Available: id(0), Must: id(3), Size: 1},
			NotAvailable, id(3),
			`must be included, but not available: "GPU-3"`,
		},
		"more included than requested": {
			Request{Available: id(0, 3), Must: id(0, 3), Size: 1},
			BadSize, nil,
			"1 device requested, but 2 must be included",
		},
		"more than available": {
			Request{Available: id(0), Size: 2},
			BadSize, nil,
			"2 devices requested, but 1 is available",
		},
		"a negative size": {Request{Available: id(0), Size: -1}, BadSize, nil, "-1 devices requested"},
		"an unhealthy one included": {
			Request{Available: id(0, 1), Must: id(1), Size: 1},
			Unusable, id(1),
			`not possible without unusable ones: ["GPU-1"]`,
		},
		"too few without the lost ones": {
			Request{Available: id(0, 1, 2), Size: 2},
			Unusable, id(1, 2),
			`2 devices requested, which is not possible without unusable ones: ["GPU-1" "GPU-2"]`,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			choice, err := p.Choose(Topology, c.r)
			var got *RequestError
			if !errors.As(err, &got) || choice.IDs != nil {
				t.Fatalf("%+v, %v", choice, err)
			}
			want := &RequestError{c.reason, c.ids, c.r.Size, len(c.r.Available), len(c.r.Must)}
			if diff := cmp.Diff(want, got); diff != "" || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %q (-want +got):\n%s", err, c.text, diff)
			}
		})
	}
	c, err := p.Choose(Topology, Request{Available: id(0, 1, 2, 3), Size: 2})
	if diff := cmp.Diff(id(0, 3), c.IDs); diff != "" || err != nil {
		t.Errorf("lost GPUs are not candidates: %v\n%s", err, diff)
	}
	if _, err := p.Choose("best", Request{}); err == nil {
		t.Error("no error for an unknown policy")
	}
}

func TestNodeFollowsTheSnapshot(t *testing.T) {
	m, err := sim.LoadMachine("dgx1-v100")
	testenv.Must(t, err)
	s := m.Snapshot(sim.DefaultDriver)
	s.Devices[2].Error = "fell off the bus"
	s.Devices[7].UUID = s.Devices[0].UUID
	s.Links[0].NVLinks = 0
	s.Links = append(s.Links, gpu.Link{A: 1, B: 1, NVLinks: 1}, gpu.Link{A: 0, B: 99, NVLinks: 1})
	n, err := NewGPUs(s, DefaultWeights())
	testenv.Must(t, err)
	if diff := cmp.Diff([]int{6, 50, 0}, []int{len(n.UUIDs()), n.Pair(0, 1), n.Pair(1, 1)}); diff != "" {
		t.Errorf("GPUs, score of the first two, of the second with itself (-want +got):\n%s", diff)
	}
}

func TestNewNodeRefusesTooManyGPUs(t *testing.T) {
	s := &gpu.Snapshot{Devices: make([]gpu.Device, maxGPUs+1)}
	for i := range s.Devices {
		s.Devices[i].Index, s.Devices[i].UUID = i, strconv.Itoa(i)
	}
	const want = "257 GPUs for allocation: at most 256"
	if n, err := NewGPUs(s, DefaultWeights()); n != nil || err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v and error %v, want one with %q", n, err, want)
	}
}

func TestLinkScores(t *testing.T) {
	w := DefaultWeights()
	w.NVSwitch = 90 // not the same as NVLink
	for link, want := range map[gpu.Link]int{
		{}:                                 0,
		{PCIe: gpu.PathSystem}:             10,
		{PCIe: gpu.PathNode}:               20,
		{PCIe: gpu.PathHostBridge}:         30,
		{PCIe: gpu.PathMultipleSwitches}:   40,
		{PCIe: gpu.PathSingleSwitch}:       50,
		{PCIe: gpu.PathSameBoard}:          60,
		{PCIe: gpu.PathSystem, NVLinks: 2}: 210,
		{PCIe: gpu.PathNode, NVLinks: 18, Switched: true}: 1640,
		{PCIe: 99}: 0,
	} {
		if got := w.Score(link); got != want {
			t.Errorf("%+v scores %d, want %d", link, got, want)
		}
	}
}

// FuzzRequest checks that any request gets an answer that fulfils it, or an error.
func FuzzRequest(f *testing.F) {
	f.Add("GPU-0 GPU-1 GPU-2", "GPU-1", 2, uint8(0))
	f.Add("GPU-0 GPU-0", "", 1, uint8(1))
	f.Add("GPU-7 ? GPU-3", "?", -1, uint8(2))
	pools := []*Pool{islands().whole}
	p, ids := replicas(f, islands())
	f.Add(strings.Join(ids[:80], " "), ids[3], 5, uint8(11))
	pools = append(pools, p)
	p, ids = migDevices(islands())
	f.Add(strings.Join(ids, " "), ids[3]+" "+ids[9], 20, uint8(14))
	pools = append(pools, p)
	f.Fuzz(func(t *testing.T, available, must string, size int, kind uint8) {
		pool := pools[int(kind)/len(Policies())%len(pools)]
		policy := Policy(Policies()[int(kind)%len(Policies())])
		r := Request{Available: strings.Fields(available), Must: strings.Fields(must), Size: size}
		c, err := pool.Choose(policy, r)
		if err != nil {
			if c.IDs != nil {
				t.Errorf("%+v and %v", c, err)
			}
			return
		}
		distinct := slices.Compact(slices.Sorted(slices.Values(c.IDs)))
		if len(distinct) != size || len(c.IDs) != size {
			t.Errorf("%v for %d", c.IDs, size)
		}
		for _, id := range distinct {
			if !slices.Contains(r.Available, id) {
				t.Errorf("%s is not available", id)
			}
		}
		for _, id := range r.Must {
			if !slices.Contains(distinct, id) {
				t.Errorf("%s must be included", id)
			}
		}
	})
}
