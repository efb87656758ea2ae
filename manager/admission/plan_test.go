package admission

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestARequestIsRefusedInTheKubeletsWords(t *testing.T) {
	pool := func(unhealthy int, ids ...string) *Pool {
		r := listed(ids...)
		for i := range unhealthy {
			r.Devices[i].Healthy = false
		}
		p := NewPool(resource)
		p.Set(r)
		return p
	}
	away := NewPool(resource)
	away.Set(model.Resource{Name: resource})
	expired := pool(0, "a")
	expired.Hold("pod", "main", []string{"a"})
	expired.Expire()
	full := pool(1, "a", "b", "c", "d")
	full.Hold("other", "main", []string{"b", "c"})
	for name, test := range map[string]struct {
		pool    *Pool
		request Request
		want    string
	}{
		"no plugin has registered": {
			NewPool(resource), Request{Count: 1}, "cannot allocate unregistered device example.com/dev",
		},
		"the plugin was away for too long": {
			expired, Request{Count: 1}, "cannot allocate unregistered device example.com/dev",
		},
		"the plugin is not back": {
			away,
			Request{Count: 1},
			"no healthy devices present; cannot allocate unhealthy devices example.com/dev",
		},
		"nothing is requested while no device is healthy": {
			pool(1, "a"),
			Request{},
			"no healthy devices present; cannot allocate unhealthy devices example.com/dev",
		},
		"too few are free": {
			full,
			Request{Count: 2},
			"requested number of devices unavailable for example.com/dev. Requested: 2, Available: 1",
		},
		"too few are free beside the reusable ones": {
			full,
			Request{Count: 4, Reusable: []string{"b", "c"}},
			"requested number of devices unavailable for example.com/dev. Requested: 2, Available: 1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := test.pool.Plan(test.request); err == nil || err.Error() != test.want {
				t.Errorf("error %v, want %s", err, test.want)
			}
		})
	}
}

func TestNothingIsChosenIfNothingIsRequested(t *testing.T) {
	p := NewPool(resource)
	p.Set(listed("a", "b"))
	plan, err := p.Plan(Request{Prefers: true})
	testenv.Must(t, err)
	if ids := plan.Pick([]string{"b"}); plan.Ask != nil || len(ids) > 0 {
		t.Errorf("asks %v, picks %q", plan.Ask, ids)
	}
}

func TestDevicesFollowTheAffinity(t *testing.T) {
	mixed := NewPool(resource)
	mixed.Set(model.Resource{Name: resource, Connected: true, Devices: []model.Device{
		{ID: "1", Healthy: true, NUMA: []int{1}},
		{ID: "1+2", Healthy: true, NUMA: []int{1, 2}},
		{ID: "2a", Healthy: true, NUMA: []int{2}},
		{ID: "2b", Healthy: true, NUMA: []int{2}},
		{ID: "empty", Healthy: true, NUMA: []int{}},
		{ID: "none", Healthy: true},
		{ID: "unknown", Healthy: true, NUMA: []int{99}},
	}})
	plain := NewPool(resource)
	plain.Set(listed("a", "b", "c"))
	for name, test := range map[string]struct {
		pool      *Pool
		count     int
		affinity  Nodes
		preferred []string // the plugin's answer, or nil if it has no opinion
		want      string
	}{
		"no device has NUMA nodes": {plain, 1, NodesOf(0, 1), nil, "a"},
		"one of node 0":            {onNodes(1, 0, 1), 1, NodesOf(0), nil, "a0"},
		"one of node 1":            {onNodes(1, 0, 1), 1, NodesOf(1), nil, "b0"},
		"two of node 0":            {onNodes(2, 0, 1), 2, NodesOf(0), nil, "a0 a1"},
		"two of node 1":            {onNodes(2, 0, 1), 2, NodesOf(1), nil, "b0 b1"},
		"more than node 0 has":     {onNodes(3, 0, 1), 4, NodesOf(0), nil, "a0 a1 a2 b0"},
		"more than node 1 has":     {onNodes(3, 0, 1), 4, NodesOf(1), nil, "a0 b0 b1 b2"},
		"all of two nodes of four": {onNodes(2, 0, 1, 2, 3), 4, NodesOf(1, 3), nil, "b0 b1 d0 d1"},
		"a device near two nodes is aligned with one of them": {mixed, 3, NodesOf(2), nil, "1+2 2a 2b"},
		"then those near other nodes, then those near none":   {mixed, 6, NodesOf(2), nil, "1 1+2 2a 2b empty unknown"},
		"the smaller node first":                              {mixed, 1, NodesOf(1, 2), nil, "1"},
		"no affinity":                                         {onNodes(2, 0, 1), 3, 0, nil, "a0 a1 b0"},
		"a preference among the aligned ones": {
			onNodes(9, 0, 1), 3, NodesOf(0), []string{"a1", "a8", "a4"}, "a1 a4 a8",
		},
		"a preference for unaligned ones is ignored while aligned ones suffice": {
			onNodes(9, 0, 1), 3, NodesOf(0), []string{"b1", "a8", "b4"}, "a0 a1 a8",
		},
		"a preference for unknown and repeated devices": {
			onNodes(9, 0, 1), 3, NodesOf(1), []string{"x", "b3", "b3", ""}, "b0 b1 b3",
		},
		"a preference for too many": {onNodes(9, 0), 2, NodesOf(0), []string{"a8", "a7", "a6"}, "a7 a8"},
		"a preference beside all aligned ones": {
			onNodes(2, 0, 1, 2), 4, NodesOf(0), []string{"a0", "a1", "b1", "c1"}, "a0 a1 b1 c1",
		},
		"a short preference beside all aligned ones": {
			onNodes(2, 0, 1, 2), 4, NodesOf(0), []string{"c1", "bogus"}, "a0 a1 b0 c1",
		},
		"a preference without an affinity": {plain, 2, 0, []string{"c"}, "a c"},
	} {
		t.Run(name, func(t *testing.T) {
			request := Request{Count: test.count, Affinity: test.affinity, Prefers: test.preferred != nil}
			for _, random := range []*rand.Rand{nil, rand.New(rand.NewPCG(1, 2))} {
				request.Random = random
				plan, err := test.pool.Plan(request)
				testenv.Must(t, err)
				got := plan.Pick(test.preferred)
				if random == nil && strings.Join(got, " ") != test.want {
					t.Errorf("chosen %q, want %s", got, test.want)
				}
				near := func(ids []string) (aligned, some int) {
					for _, nodes := range test.pool.NUMA(ids) {
						if some++; NodesOf(nodes...)&test.affinity != 0 {
							aligned++
						}
					}
					return aligned, some
				}
				a, s := near(got)
				if wantA, wantS := near(strings.Fields(test.want)); test.affinity != 0 && (a != wantA || s != wantS) {
					t.Errorf("chosen %q: %d aligned and %d with NUMA nodes, want %d and %d", got, a, s, wantA, wantS)
				}
			}
		})
	}
}

func TestWhatIsAsked(t *testing.T) {
	for name, test := range map[string]struct {
		pool        *Pool
		held        string
		request     Request
		want        string // available | must include | size, or empty
		wantKubelet string // or the same
	}{
		"one of many": {
			pool: onNodes(4, 0), request: Request{Count: 1, Affinity: 1}, want: "a0 a1 a2 a3||1",
		},
		"two reusable ones, and two of the free ones": {
			pool: onNodes(8, 0), held: "a0 a5", request: Request{Count: 4, Affinity: 1, Reusable: []string{"a0", "a5"}},
			want: "a0 a1 a2 a3 a4 a5 a6 a7|a0 a5|4",
		},
		"devices of other pods are not available": {
			pool: onNodes(8, 0), held: "a0 a1 a4 a5",
			request: Request{Count: 4, Affinity: 1, Reusable: []string{"a0", "a5"}}, want: "a0 a2 a3 a5 a6 a7|a0 a5|4",
		},
		"all aligned ones are taken, one of the others is not": {
			pool: onNodes(4, 0, 1), held: "a1 b2", request: Request{Count: 6, Affinity: 1, Reusable: []string{"a1", "b2"}},
			want: "a0 a1 a2 a3 b0 b1 b2 b3|a0 a1 a2 a3 b2|6",
		},
		"all that are free and reusable are the only answer": {
			pool: onNodes(4, 0, 1), held: "a0 a1 b2 b3",
			request: Request{Count: 6, Affinity: 1, Reusable: []string{"a1", "b2"}}, want: "",
		},
		"all aligned ones are the only good answer": {
			pool: onNodes(2, 0, 1), request: Request{Count: 2, Affinity: 1}, want: "",
		},
		"some of the reusable ones suffice": {
			pool: onNodes(4, 0), held: "a0 a1 a2", request: Request{Count: 2, Reusable: []string{"a0", "a1", "a2"}},
			want: "a0 a1 a2||2",
		},
		"all reusable ones are the only answer": {
			pool: onNodes(4, 0), held: "a0 a1", request: Request{Count: 2, Reusable: []string{"a0", "a1"}}, want: "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := test.pool
			p.Hold("pod", "init", strings.Fields(test.held))
			test.request.Prefers = true
			plan, err := p.Plan(test.request)
			testenv.Must(t, err)
			got := ""
			if a := plan.Ask; a != nil {
				got = fmt.Sprintf("%s|%s|%d", strings.Join(a.Available, " "), strings.Join(a.MustInclude, " "), a.Size)
			}
			if got != test.want {
				t.Errorf("asked %q, want %q", got, test.want)
			}
			if ids := plan.Pick(nil); len(ids) != test.request.Count {
				t.Errorf("picked %q, want %d", ids, test.request.Count)
			}
			test.request.Prefers = false
			if plan, err = p.Plan(test.request); err != nil || plan.Ask != nil {
				t.Errorf("asks a plugin without preferences: %v, %v", plan.Ask, err)
			}
		})
	}
}

// admit gives the containers of a pod their devices, as the service does.
func admit(t *testing.T, p *Pool, pod model.Pod) map[string][]string {
	t.Helper()
	reuse, given := Reuse{}, map[string][]string{}
	for i, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		plan, err := p.Plan(Request{Count: c.Limits[resource], Reusable: reuse.Devices(resource)})
		testenv.Must(t, err)
		given[c.Name] = plan.Pick(nil)
		p.Hold(pod.UID, c.Name, given[c.Name])
		reuse.Took(resource, given[c.Name], i < len(pod.InitContainers) && !c.Sidecar)
	}
	return given
}

func needs(name string, n int) model.Container {
	return model.Container{Name: name, Limits: map[string]int{resource: n}}
}

func sidecar(name string, n int) model.Container {
	c := needs(name, n)
	c.Sidecar = true
	return c
}

func TestInitContainersLeaveTheirDevices(t *testing.T) {
	for name, test := range map[string]struct {
		pod  model.Pod
		want map[string][]string
	}{
		"to init containers and containers": {
			model.Pod{
				InitContainers: []model.Container{needs("init1", 1), needs("init2", 2)},
				Containers:     []model.Container{needs("app1", 1), needs("app2", 1)},
			},
			map[string][]string{"init1": {"a"}, "init2": {"a", "b"}, "app1": {"a"}, "app2": {"b"}},
		},
		"to a sidecar, which keeps them": {
			model.Pod{
				InitContainers: []model.Container{needs("init", 2), sidecar("sidecar1", 1), sidecar("sidecar2", 1)},
				Containers:     []model.Container{needs("app", 1)},
			},
			map[string][]string{"init": {"a", "b"}, "sidecar1": {"a"}, "sidecar2": {"b"}, "app": {"c"}},
		},
		"those of a sidecar are not left to an init container": {
			model.Pod{
				InitContainers: []model.Container{sidecar("sidecar", 1), needs("init", 2)},
				Containers:     []model.Container{needs("app", 3)},
			},
			map[string][]string{"sidecar": {"a"}, "init": {"b", "c"}, "app": {"b", "c", "d"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := NewPool(resource)
			p.Set(listed("a", "b", "c", "d"))
			if diff := cmp.Diff(test.want, admit(t, p, test.pod), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAReusableDeviceThatIsUnhealthyIsNotReused(t *testing.T) {
	p := NewPool(resource)
	p.Hold("pod", "init", []string{"a"})
	r := listed("a", "b")
	r.Devices[0].Healthy = false
	p.Set(r)
	plan, err := p.Plan(Request{Count: 1, Reusable: []string{"a", "gone"}})
	testenv.Must(t, err)
	if got := plan.Pick(nil); !slices.Equal(got, []string{"b"}) {
		t.Errorf("chosen %q, want b", got)
	}
}

// A pod can ask for devices that are not healthy, and gets those only that it names.
func TestUnhealthyDevicesAreChosenIfTheyAreAskedFor(t *testing.T) {
	r := listed("a", "b", "c")
	r.Devices[0].Healthy, r.Devices[1].Healthy = false, false
	for name, c := range map[string]struct {
		request Request
		gone    bool // the plugin is not connected
		want    string
	}{
		"one":                         {Request{Count: 1, Among: []string{"a"}, Unhealthy: true}, false, "a"},
		"one of another pod":          {Request{Count: 1, Among: []string{"b"}, Unhealthy: true}, false, ""},
		"without the names":           {Request{Count: 2, Unhealthy: true}, false, ""},
		"without the wish":            {Request{Count: 1, Among: []string{"a"}}, false, ""},
		"the plugin is not connected": {Request{Count: 1, Among: []string{"a"}, Unhealthy: true}, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := NewPool(resource)
			p.Hold("pod", "main", []string{"b"})
			now := r
			now.Connected = !c.gone
			p.Set(now)
			plan, err := p.Plan(c.request)
			if (err == nil) != (c.want != "") {
				t.Fatalf("error %v, want %q", err, c.want)
			}
			if err == nil && strings.Join(plan.Pick(nil), " ") != c.want {
				t.Errorf("chosen are others than %q", c.want)
			}
		})
	}
}

func TestTheRandomChoiceFollowsItsSeed(t *testing.T) {
	p := onNodes(20, 0, 1)
	choose := func(seed uint64) string {
		plan, err := p.Plan(Request{Count: 5, Affinity: NodesOf(0), Random: rand.New(rand.NewPCG(seed, 0))})
		testenv.Must(t, err)
		return strings.Join(plan.Pick(nil), " ")
	}
	seen := map[string]bool{}
	for seed := range uint64(10) {
		first, second := choose(seed), choose(seed)
		if first != second {
			t.Errorf("seed %d gives %s and %s", seed, first, second)
		}
		seen[first] = true
	}
	if len(seen) < 5 {
		t.Errorf("ten seeds give %d choices", len(seen))
	}
}

// TestAChoiceIsAlwaysValid chooses from random pools with any answer of the plugin.
func TestAChoiceIsAlwaysValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, pool := NewPool(resource), map[string]model.Device{}
		var list model.Resource
		list.Connected = true
		for i := range rapid.IntRange(1, 90).Draw(t, "devices") {
			d := model.Device{
				ID: fmt.Sprintf("%02d", i), Healthy: rapid.IntRange(0, 5).Draw(t, "healthy") > 0,
				NUMA: rapid.SliceOfNDistinct(rapid.IntRange(0, 3), 0, 2, rapid.ID).Draw(t, "nodes"),
			}
			list.Devices, pool[d.ID] = append(list.Devices, d), d
		}
		p.Set(list)
		ids := rapid.SliceOfDistinct(rapid.SampledFrom(slices.Sorted(maps.Keys(pool))), rapid.ID)
		reusable := ids.Draw(t, "reusable")
		p.Hold("pod", "init", reusable)
		others := slices.DeleteFunc(
			ids.Draw(t, "others"),
			func(id string) bool { return slices.Contains(reusable, id) },
		)
		p.Hold("other", "main", others)
		r := Request{
			Count: rapid.IntRange(1, 30).Draw(t, "count"), Reusable: reusable, Prefers: rapid.Bool().Draw(t, "prefers"),
			Affinity: Nodes(rapid.IntRange(0, 15).Draw(t, "affinity")),
		}
		if rapid.Bool().Draw(t, "random") {
			r.Random = rand.New(rand.NewPCG(1, rapid.Uint64().Draw(t, "seed")))
		}
		plan, err := p.Plan(r)
		usable := func(id string) bool { return pool[id].Healthy && !slices.Contains(others, id) }
		reused := slices.DeleteFunc(slices.Clone(reusable), func(id string) bool { return !usable(id) })
		free, aligned := 0, 0
		for id, d := range pool {
			if usable(id) && !slices.Contains(reusable, id) {
				if free++; NodesOf(d.NUMA...)&r.Affinity != 0 {
					aligned++
				}
			}
		}
		if possible := len(reused)+free >= r.Count && free+p.healthy.count() > 0; (err == nil) != possible {
			t.Fatalf("error %v with %d reusable and %d free devices for %d", err, len(reused), free, r.Count)
		}
		if err != nil {
			return
		}
		p.Set(model.Resource{Connected: true}) // all devices leave while the plugin answers
		got := plan.Pick(append(ids.Draw(t, "preferred"), "unknown"))
		var gotReused, gotAligned int
		for _, id := range got {
			switch {
			case !usable(id):
				t.Fatalf("%s is not free", id)
			case slices.Contains(reused, id):
				gotReused++
			case NodesOf(pool[id].NUMA...)&r.Affinity != 0:
				gotAligned++
			}
		}
		if unique := slices.Compact(slices.Sorted(slices.Values(got))); len(unique) != r.Count || len(got) != r.Count {
			t.Fatalf("chosen %q for %d", got, r.Count)
		}
		want := min(r.Count, len(reused))
		if gotReused != want || gotAligned != min(r.Count-want, aligned) {
			t.Fatalf("%d of %d reusable devices and %d of %d aligned ones are chosen for %d",
				gotReused, len(reused), gotAligned, aligned, r.Count)
		}
	})
}
