package allocator

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/gpu"
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

func all(n *Node) []string { return uuids(n, places(len(n.gpus))...) }

// islands are two of four GPUs each, with NVLinks between those of one.
func islands() *Node {
	o := &oracle{score: square[int](8), numa: make([]int, 8)}
	for a := range 8 {
		for b := range a {
			s := 10
			if a/4 == b/4 {
				s = 1210
			}
			o.score[a][b], o.score[b][a] = s, s
		}
	}
	return o.node()
}

// One request after the other gets the best GPUs, and leaves the best for the next.
func TestRequestsDoNotBreakIslands(t *testing.T) {
	cases := map[string]struct {
		node  *Node
		sizes []int
		want  [][]int
	}{
		"single GPUs come from one island":          {islands(), []int{1, 1, 1, 1, 4}, [][]int{{0}, {1}, {2}, {3}, {4, 5, 6, 7}}},
		"pairs come from one island":                {islands(), []int{2, 2, 4}, [][]int{{0, 1}, {2, 3}, {4, 5, 6, 7}}},
		"a single GPU goes to the broken island":    {islands(), []int{2, 1, 4, 1}, [][]int{{0, 1}, {2}, {4, 5, 6, 7}, {3}}},
		"of the cube mesh, one side stays whole":    {machine(t, "dgx1-v100"), []int{1, 2, 4, 1}, [][]int{{0}, {2, 3}, {4, 5, 6, 7}, {1}}},
		"and pairs have two NVLinks and one switch": {machine(t, "dgx1-v100"), []int{2, 2, 2, 2}, [][]int{{2, 3}, {6, 7}, {0, 4}, {1, 5}}},
		"a pair has the one switch there is":        {machine(t, "pcie-quad"), []int{2, 1, 1}, [][]int{{2, 3}, {0}, {1}}},
		"and single ones leave it the pair":         {machine(t, "pcie-quad"), []int{1, 1, 2}, [][]int{{0}, {1}, {2, 3}}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			free := places(len(c.node.gpus))
			var got [][]int
			for _, size := range c.sizes {
				choice, err := c.node.Choose(Topology, Request{Available: uuids(c.node, free...), Size: size})
				if err != nil {
					t.Fatal(err)
				}
				var x []int
				for _, id := range choice.IDs {
					x = append(x, c.node.byUUID[id])
				}
				got, free = append(got, x), minus(free, x)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// On every machine that has two halves, small requests leave one half whole for as long as they fit into the other.
// Two pairs of the cube mesh do not: the best second pair, which is what is asked for, is on the other side.
func TestSmallRequestsLeaveAHalf(t *testing.T) {
	for _, name := range []string{"dgx1-v100", "dgx-h100", "dgx-a100", "hgx-16"} {
		n := machine(t, name)
		half := len(n.gpus) / 2
		best := oracleOf(n).bestOf(places(len(n.gpus)), half)
		for _, sizes := range [][]int{{1, 1, 2}, {2, 2}, {1, 2, 1}, {2, 1, 1}} {
			if name == "dgx1-v100" && len(sizes) == 2 {
				continue
			}
			free := all(n)
			for _, size := range sizes {
				c, err := n.Choose(Topology, Request{Available: free, Size: size})
				if err != nil {
					t.Fatal(err)
				}
				free = slices.DeleteFunc(free, func(id string) bool { return slices.Contains(c.IDs, id) })
			}
			c, err := n.Choose(Topology, Request{Available: free, Size: half})
			if err != nil {
				t.Fatal(err)
			}
			if c.Score != best {
				t.Errorf("%s: after requests of %v, %d GPUs score %d of %d", name, sizes, half, c.Score, best)
			}
		}
	}
}

func TestTheOrderOfGPUsDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := drawMatrix(t, upTo(t, 1, 12, "GPUs"))
		p := drawProblem(t, len(o.score))
		order := rapid.Permutation(places(len(o.score))).Draw(t, "order")
		other := &oracle{score: square[int](len(order)), numa: make([]int, len(order))}
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
		for _, policy := range []Policy{Topology, NUMA} { // of the best partitions the first counts, and so does the order
			a, errA := n.Choose(policy, p.request(n))
			b, errB := m.Choose(policy, q.request(m))
			if errA != nil || errB != nil || a.Score != b.Score {
				t.Errorf("%s: %+v, %v; in another order %+v, %v", policy, a, errA, b, errB)
			}
		}
	})
}

func TestManyAskAtOnce(t *testing.T) {
	n := machine(t, "hgx-16")
	want := map[int]Choice{}
	for size := range 9 {
		c, err := n.Choose(Partition, Request{Available: all(n), Size: size})
		if err != nil {
			t.Fatal(err)
		}
		want[size] = c
	}
	n = machine(t, "hgx-16")
	var callers sync.WaitGroup
	for caller := range 8 {
		callers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(caller), 0))
			for range 50 {
				size := rng.IntN(9)
				c, err := n.Choose(Partition, Request{Available: all(n), Size: size})
				if diff := cmp.Diff(want[size], c); diff != "" || err != nil {
					t.Errorf("%d: %v\n%s", size, err, diff)
				}
			}
		})
	}
	callers.Wait()
}

func TestRequestsWithoutAnAnswer(t *testing.T) {
	n := islands()
	devices := slices.Clone(n.whole.devices)
	devices[1].Unusable = true
	devices[2].Parent = "GPU-lost"
	p := NewPool(n, devices)
	id := func(places ...int) []string { return uuids(n, places...) }
	long := strings.Repeat("x", 1000)
	many := strings.Fields(strings.Repeat("? ", 20))
	cases := map[string]struct {
		r    Request
		want RequestError
		says string
	}{
		"an unknown device":           {Request{Available: []string{"GPU-0", "?"}, Size: 1}, RequestError{Reason: Unknown, IDs: []string{"?"}}, `no such device: "?"`},
		"an unknown one included":     {Request{Available: id(0), Must: []string{"?"}, Size: 1}, RequestError{Reason: Unknown, IDs: []string{"?"}}, `no such device: "?"`},
		"a name of any length":        {Request{Available: []string{long}}, RequestError{Reason: Unknown, IDs: []string{long}}, `no such device: "` + long[:80] + `..."`},
		"many of them":                {Request{Available: many}, RequestError{Reason: Unknown, IDs: many}, `no such device: ` + strings.Repeat(`"?", `, 8) + "and 12 more"},
		"a device twice":              {Request{Available: id(0, 0), Size: 1}, RequestError{Reason: Twice, IDs: id(0)}, `there twice: "GPU-0"`},
		"one included twice":          {Request{Available: id(0, 3), Must: id(0, 0), Size: 2}, RequestError{Reason: Twice, IDs: id(0)}, `there twice: "GPU-0"`},
		"included, but not available": {Request{Available: id(0), Must: id(3), Size: 1}, RequestError{Reason: NotAvailable, IDs: id(3)}, `must be included, but not available: "GPU-3"`},
		"more included than asked":    {Request{Available: id(0, 3), Must: id(0, 3), Size: 1}, RequestError{Reason: BadSize}, "1 devices are asked for, and 2 must be included"},
		"more than available":         {Request{Available: id(0), Size: 2}, RequestError{Reason: BadSize}, "2 devices are asked for, and 1 are available"},
		"less than nothing":           {Request{Available: id(0), Size: -1}, RequestError{Reason: BadSize}, "-1 devices are asked for"},
		"an unhealthy one included":   {Request{Available: id(0, 1), Must: id(1), Size: 1}, RequestError{Reason: Unusable, IDs: id(1)}, `cannot be had without: "GPU-1"`},
		"too few without the lost":    {Request{Available: id(0, 1, 2), Size: 2}, RequestError{Reason: Unusable, IDs: id(1, 2)}, `2 devices are asked for, and cannot be had without: "GPU-1", "GPU-2"`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			choice, err := p.Choose(Topology, c.r)
			var got *RequestError
			if !errors.As(err, &got) || choice.IDs != nil {
				t.Fatalf("%+v, %v", choice, err)
			}
			c.want.Size, c.want.Available, c.want.Must = c.r.Size, len(c.r.Available), len(c.r.Must)
			if diff := cmp.Diff(&c.want, got); diff != "" || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q (-want +got):\n%s", err, c.says, diff)
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

func TestNodesFollowSnapshots(t *testing.T) {
	m, err := sim.LoadMachine("dgx1-v100")
	if err != nil {
		t.Fatal(err)
	}
	n, err := NewNode(m.Snapshot(sim.DefaultDriver), DefaultWeights())
	if err != nil {
		t.Fatal(err)
	}
	same, err := n.Renew(m.Snapshot(sim.DefaultDriver), DefaultWeights())
	if err != nil || same != n {
		t.Errorf("nothing has changed, and there is another node: %v", err)
	}
	lost := m.Snapshot(sim.DefaultDriver)
	lost.Devices[2].Error = "fell off the bus"
	lost.Links[0].NVLinks = 0
	next, err := n.Renew(lost, DefaultWeights())
	if err != nil {
		t.Fatal(err)
	}
	if len(next.GPUs()) != 7 || next.Pair(0, 1) != 50 || n.Pair(0, 1) != 150 {
		t.Errorf("%d GPUs; the first two score %d, and %d before", len(next.GPUs()), next.Pair(0, 1), n.Pair(0, 1))
	}
	if score, err := next.Score(uuids(next, 0, 1, 3)); err != nil || score != 50+next.Pair(0, 3)+next.Pair(1, 3) {
		t.Errorf("%d, %v", score, err)
	}
	if _, err := n.Renew(lost, Weights{NVLink: MaxWeight + 1}); err == nil || !strings.Contains(err.Error(), "nvlink: 10001") {
		t.Errorf("%v", err)
	}
	many := &gpu.Snapshot{Devices: make([]gpu.Device, MaxGPUs+1)}
	for i := range many.Devices {
		many.Devices[i].Index, many.Devices[i].UUID = i, string(rune('a'+i))
	}
	if _, err := NewNode(many, DefaultWeights()); err == nil {
		t.Error("no error for too many GPUs")
	}
}

func TestMatricesThatAreNone(t *testing.T) {
	gpus := []GPU{{UUID: "a"}, {UUID: "b", Index: 1}}
	for name, c := range map[string]struct {
		gpus  []GPU
		score [][]int
	}{
		"a row too few":     {gpus, [][]int{{0, 1}}},
		"a short row":       {gpus, [][]int{{0, 1}, {1}}},
		"no symmetry":       {gpus, [][]int{{0, 1}, {2, 0}}},
		"a GPU with itself": {gpus, [][]int{{1, 1}, {1, 0}}},
		"less than nothing": {gpus, [][]int{{0, -1}, {-1, 0}}},
		"too much":          {gpus, [][]int{{0, MaxScore + 1}, {MaxScore + 1, 0}}},
		"a name twice":      {[]GPU{{UUID: "a"}, {UUID: "a"}}, [][]int{{0, 1}, {1, 0}}},
		"no name":           {[]GPU{{UUID: "a"}, {}}, [][]int{{0, 1}, {1, 0}}},
	} {
		if n, err := NewNodeFromMatrix(c.gpus, c.score); err == nil || n != nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestLinkScores(t *testing.T) {
	w := DefaultWeights()
	w.NVSwitch = 90 // to tell it from the other
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

// FuzzRequest gives pools whatever a caller could: an answer that fulfils the request, or an error.
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
