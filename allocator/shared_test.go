package allocator

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// sharingProblem is a pool and a request, by the numbers of devices of each GPU.
type sharingProblem struct {
	o                 *oracle
	replicas          bool
	total, free, must []int
	slices            []int // of each device of a GPU
	others            []int // slices of each GPU in use outside the pool
	size              int
}

func drawSharing(t *rapid.T) *sharingProblem {
	n := upTo(t, 1, 4, "GPUs")
	s := &sharingProblem{o: drawOracle(t, n), replicas: rapid.Bool().Draw(t, "replicas")}
	least, most := 0, 0
	for range n {
		total := upTo(t, 0, 4, "devices")
		free := upTo(t, 0, total, "available")
		must := max(0, rapid.IntRange(-3, free).Draw(t, "included"))
		s.total, s.free, s.must = append(s.total, total), append(s.free, free), append(s.must, must)
		s.slices = append(s.slices, upTo(t, 1, 4, "slices"))
		s.others = append(s.others, upTo(t, 0, 7, "slices of others"))
		least, most = least+must, most+free
	}
	s.size = rapid.IntRange(least, most).Draw(t, "size")
	return s
}

// pool returns the pool and the request.
func (s *sharingProblem) pool() (*Pool, Request) {
	n := s.o.node()
	r := Request{Size: s.size, Used: map[string]int{}}
	var devices []Device
	for g, total := range s.total {
		r.Used[n.list[g].uuid] = s.others[g]
		for i := range total {
			d := Device{
				ID: fmt.Sprintf("%d::%d", g, i), Parent: n.list[g].uuid, Replica: s.replicas, Slices: s.slices[g],
			}
			d.UUID = d.ID
			if s.replicas {
				d.UUID = d.Parent
			}
			devices = append(devices, d)
			if i < s.free[g] {
				r.Available = append(r.Available, d.ID)
			}
			if i < s.must[g] {
				r.Must = append(r.Must, d.ID)
			}
		}
	}
	p := NewPool(n, devices)
	p.several = true // also if no GPU has two devices
	return p, r
}

// answers returns all possible answers, as numbers of devices of each GPU.
func (s *sharingProblem) answers() [][]int {
	var all [][]int
	var take func(x []int, left int)
	take = func(x []int, left int) {
		g := len(x)
		if g == len(s.free) {
			if left == 0 {
				all = append(all, slices.Clone(x))
			}
			return
		}
		for i := s.must[g]; i <= min(s.free[g], left); i++ {
			take(append(x, i), left-i)
		}
	}
	take(nil, s.size)
	return all
}

// cost returns what a policy minimises, the most important part first.
func (s *sharingProblem) cost(policy Policy, x []int) []int {
	var squares, loads, inUse, full, left, fromFree int
	var gpus []int
	for g, taken := range x {
		used := s.total[g] - s.free[g]
		squares += taken * taken
		loads += (used + taken) * (used + taken)
		inUse += used * taken
		fromFree += s.free[g] * taken
		if taken > 0 {
			gpus = append(gpus, g)
			left += s.free[g]
			full += used*s.slices[g] + s.others[g]
		}
	}
	score := -s.o.sum(gpus)
	switch {
	case policy == Spread && s.replicas:
		return []int{squares, inUse, score}
	case policy == Pack && s.replicas:
		return []int{squares, -inUse, score}
	case policy == Spread:
		return []int{loads, -len(gpus), score}
	case policy == Pack:
		return []int{len(gpus), -full, left, score, fromFree}
	}
	return []int{squares, score}
}

func (s *sharingProblem) check(t rapid.TB, policy Policy) {
	t.Helper()
	p, r := s.pool()
	c, err := p.Choose(policy, r)
	if err != nil {
		t.Fatalf("%s %+v: %v", policy, s, err)
	}
	x := make([]int, len(s.free))
	seen := map[string]bool{}
	for _, id := range c.IDs {
		if seen[id] || !slices.Contains(r.Available, id) {
			t.Fatalf("%s %+v: %s is listed twice or not available", policy, r, id)
		}
		seen[id] = true
		x[p.gpus.index[p.devices[p.index[id]].Parent]]++
	}
	for _, id := range r.Must {
		if !seen[id] {
			t.Fatalf("%s %+v: %s must be included", policy, r, id)
		}
	}
	var best []int
	for _, answer := range s.answers() {
		if cost := s.cost(policy, answer); best == nil || slices.Compare(cost, best) < 0 {
			best = cost
		}
	}
	if diff := cmp.Diff(best, s.cost(policy, x)); diff != "" {
		t.Fatalf("%s: %+v: %v devices are taken, with the cost (-best +got):\n%s", policy, s, x, diff)
	}
}

func TestSharedDevicesAreTheBestByTheFormula(t *testing.T) {
	for _, policy := range []Policy{Spread, Pack, Topology} {
		t.Run(string(policy), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { drawSharing(t).check(t, policy) })
		})
	}
}

func TestPackOnALargeNode(t *testing.T) {
	const gpus, each = 20, 7
	n := newOracle(gpus).node()
	var devices []Device
	for g := range gpus {
		for i := range each {
			id := fmt.Sprintf("MIG-%d-%d", g, i)
			devices = append(devices, Device{ID: id, UUID: id, Parent: n.list[g].uuid})
		}
	}
	p := NewPool(n, devices)
	var available []string
	left := map[int]int{0: 2, 4: 5, 9: 3} // the others have all devices
	for g := range gpus {
		count, some := left[g]
		if !some {
			count = each
		}
		for i := range count {
			available = append(available, fmt.Sprintf("MIG-%d-%d", g, i))
		}
	}
	for name, c := range map[string]struct {
		size int
		want map[string]int
	}{
		"the fullest GPU that has enough":           {3, map[string]int{"GPU-9": 3}},
		"not a fuller one that has too few":         {4, map[string]int{"GPU-4": 4}},
		"a whole one if no other has enough":        {6, map[string]int{"GPU-1": 6}},
		"a whole one, and the fullest for the rest": {9, map[string]int{"GPU-0": 2, "GPU-1": 7}},
	} {
		t.Run(name, func(t *testing.T) {
			choice, err := p.Choose(Pack, Request{Available: available, Size: c.size})
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]int{}
			for _, id := range choice.IDs {
				got[p.devices[p.index[id]].Parent]++
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// replicas returns 64 replicas of each GPU of a node.
func replicas(t testing.TB, n *GPUs) (*Pool, []string) {
	t.Helper()
	var devices []Device
	var ids []string
	for _, g := range n.list {
		for i := range 64 {
			d := Device{ID: fmt.Sprintf("%s::%d", g.uuid, i), UUID: g.uuid, Parent: g.uuid, Replica: true}
			devices, ids = append(devices, d), append(ids, d.ID)
		}
	}
	return NewPool(n, devices), ids
}

// migDevices returns seven MIG devices on each GPU of a node.
func migDevices(n *GPUs) (*Pool, []string) {
	var devices []Device
	var ids []string
	for _, g := range n.list {
		for i := range 7 {
			d := Device{ID: fmt.Sprintf("MIG-%s-%d", g.uuid, i), Parent: g.uuid}
			d.UUID = d.ID
			devices, ids = append(devices, d), append(ids, d.ID)
		}
	}
	return NewPool(n, devices), ids
}

func TestReplicasAreOfDifferentGPUs(t *testing.T) {
	p, ids := replicas(t, machine(t, "dgx-h100"))
	rapid.Check(t, func(t *rapid.T) {
		available := rapid.Permutation(ids).Draw(t, "order")[:rapid.IntRange(1, len(ids)).Draw(t, "available")]
		has := map[string]int{}
		for _, id := range available {
			has[p.devices[p.index[id]].Parent]++
		}
		size := rapid.IntRange(1, min(16, len(available))).Draw(t, "size")
		for _, policy := range Policies() {
			c, err := p.Choose(Policy(policy), Request{Available: available, Size: size})
			if err != nil {
				t.Fatal(err)
			}
			took := map[string]int{}
			for _, id := range c.IDs {
				took[p.devices[p.index[id]].Parent]++
			}
			for a := range took {
				for b := range has {
					if took[a] > took[b]+1 && took[b] < has[b] {
						t.Fatalf("%s: %d replicas of %s and %d of %s with %d", policy, took[a], a, took[b], b, has[b])
					}
				}
			}
			if len(c.IDs) != size {
				t.Fatalf("%s: %d devices, want %d", policy, len(c.IDs), size)
			}
		}
	})
}

func TestReplicasAreOfDifferentMIGDevices(t *testing.T) {
	n := newOracle(1).node()
	var devices []Device
	var ids []string
	for m := range 2 {
		for i := range 3 {
			d := Device{UUID: fmt.Sprintf("MIG-%d", m), Parent: "GPU-0", Replica: true}
			d.ID = fmt.Sprintf("%s::%d", d.UUID, i)
			devices, ids = append(devices, d), append(ids, d.ID)
		}
	}
	c, err := NewPool(n, devices).Choose(Spread, Request{Available: ids, Size: 3})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"MIG-0::0", "MIG-0::1", "MIG-1::0"}, c.IDs); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
