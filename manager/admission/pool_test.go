package admission

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/manager/model"
)

const resource = "example.com/dev"

// listed returns a connected resource with healthy devices, without NUMA nodes.
func listed(ids ...string) model.Resource {
	r := model.Resource{Name: resource, Connected: true}
	for _, id := range ids {
		r.Devices = append(r.Devices, model.Device{ID: id, Healthy: true})
	}
	return r
}

// onNodes returns a pool with n healthy devices on each of the NUMA nodes: a0, a1, ... on the first, b0, ... on the
// second.
func onNodes(n int, nodes ...int) *Pool {
	r := listed()
	for i, node := range nodes {
		for d := range n {
			id := fmt.Sprintf("%c%d", 'a'+i, d)
			r.Devices = append(r.Devices, model.Device{ID: id, Healthy: true, NUMA: []int{node}})
		}
	}
	p := NewPool(resource)
	p.Set(r)
	return p
}

func TestCounts(t *testing.T) {
	p := NewPool(resource)
	unhealthy := func(r model.Resource, ids ...string) model.Resource {
		for i, d := range r.Devices {
			r.Devices[i].Healthy = d.Healthy && !slices.Contains(ids, d.ID)
		}
		return r
	}
	away := listed("a", "b")
	away.Connected = false
	for _, step := range []struct {
		does                  string
		do                    func()
		capacity, allocatable int
		registered            bool
	}{
		{"no plugin has registered", func() {}, 0, 0, false},
		{"three devices, one of them unhealthy", func() { p.Set(unhealthy(listed("a", "b", "c"), "c")) }, 3, 2, true},
		{"the unhealthy device is gone", func() { p.Set(listed("a", "b")) }, 2, 2, true},
		{"a device turns unhealthy", func() { p.Set(unhealthy(listed("a", "b", "c"), "b", "c")) }, 3, 1, true},
		{"the healthy device is gone", func() { p.Set(unhealthy(listed("b", "c"), "b", "c")) }, 2, 0, true},
		{"held devices count", func() { p.Set(listed("a", "b")); p.Hold("pod", "main", []string{"a"}) }, 2, 2, true},
		{"withheld devices are not allocatable, held ones are", func() { p.Withhold(nil) }, 2, 1, true},
		{"nothing is withheld any more", p.ClearAll, 2, 2, true},
		{"without a plugin no device is healthy", func() { p.Set(away) }, 2, 0, true},
		{"the plugin was away for too long", p.Expire, 0, 0, false},
		{"it comes back", func() { p.Set(listed("a", "b")) }, 2, 2, true},
	} {
		step.do()
		capacity, allocatable := p.Counts()
		if capacity != step.capacity || allocatable != step.allocatable || p.Registered() != step.registered {
			t.Errorf("%s: capacity %d, allocatable %d, registered %t", step.does, capacity, allocatable, p.Registered())
		}
	}
	if pod, containers := p.Holder("a"); pod != "pod" || !slices.Equal(containers, []string{"main"}) {
		t.Errorf("a is held by %q %q", pod, containers)
	}
}

func TestHeldDevicesStayHeld(t *testing.T) {
	p := NewPool(resource)
	p.Hold("first", "init", []string{"a", "b"}) // as after a restart, before the plugin is back
	p.Hold("first", "main", []string{"a"})
	p.Set(listed("b", "c"))
	want := []State{
		{Device: model.Device{ID: "a"}, Pod: "first", Containers: []string{"init", "main"}},
		{Device: model.Device{ID: "b", Healthy: true}, Pod: "first", Containers: []string{"init"}},
		{Device: model.Device{ID: "c", Healthy: true}},
	}
	if diff := cmp.Diff(want, p.States(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
	p.Set(listed("a", "b", "c"))
	if got := available(p); !slices.Equal(got, []string{"c"}) {
		t.Errorf("%q are available with a back, want c", got)
	}
	p.Release("other", "init", []string{"a", "b"})
	p.Release("first", "init", []string{"a", "b"})
	if got := available(p); !slices.Equal(got, []string{"b", "c"}) {
		t.Errorf("%q are available after init, want b and c: main shares a", got)
	}
	p.Release("first", "main", []string{"a"})
	if got := available(p); len(got) != 3 || p.Held() != 0 {
		t.Errorf("%q are available after the pod, and %d held", got, p.Held())
	}
}

func TestADeviceOfTwoPodsIsHeldUntilBothAreGone(t *testing.T) {
	for _, order := range [][]string{{"first", "second"}, {"second", "first"}} {
		p := NewPool(resource)
		p.Set(listed("a"))
		p.Hold("first", "main", []string{"a"})
		p.Hold("second", "main", []string{"a"})
		if pod, containers := p.Holder("a"); pod != "first" || len(containers) != 1 {
			t.Errorf("a is held by %q of %s", containers, pod)
		}
		p.Release(order[0], "main", []string{"a"})
		if pod, _ := p.Holder("a"); len(available(p)) > 0 || pod != order[1] {
			t.Errorf("a is held by %q without %s", pod, order[0])
		}
		p.Release(order[1], "main", []string{"a"})
		if pod, _ := p.Holder("a"); len(available(p)) != 1 || pod != "" {
			t.Errorf("a is held by %q without the pods", pod)
		}
	}
}

func TestWithheldDevicesAreGivenToNobody(t *testing.T) {
	p := NewPool(resource)
	p.Hold("known", "main", []string{"a"})
	p.Withhold([]string{"b"})
	p.Set(listed("a", "b", "c", "d"))
	if got := available(p); !slices.Equal(got, []string{"b"}) {
		t.Errorf("%q are available, want b that was cleared before", got)
	}
	p.Release("known", "main", []string{"a"})
	p.Clear([]string{"c", "later"})
	p.Set(listed("a", "b", "c", "d", "e", "later"))
	if got := available(p); !slices.Equal(got, []string{"b", "c", "later"}) {
		t.Errorf("%q are available, want those that are cleared", got)
	}
	for _, s := range p.States() {
		if want := s.ID == "a" || s.ID == "d" || s.ID == "e"; s.Withheld != want {
			t.Errorf("%s withheld: %t", s.ID, s.Withheld)
		}
	}
	p.ClearAll()
	if got := available(p); len(got) != 6 {
		t.Errorf("%q are available after all", got)
	}
}

func available(p *Pool) []string { return p.ids(nil, p.healthy.without(p.busy), len(p.devices)) }

// TestPoolIsASimpleModel does random things with a pool of many devices and with plain maps.
func TestPoolIsASimpleModel(t *testing.T) {
	all := make([]string, 150)
	for i := range all {
		all[i] = fmt.Sprintf("%03d", i)
	}
	rapid.Check(t, func(t *rapid.T) {
		p, list := NewPool(resource), model.Resource{}
		holders := map[string]map[string]bool{} // pod/container by ID
		var cleared map[string]bool             // or nil
		some := func() []string {
			first := rapid.IntRange(0, len(all)).Draw(t, "first")
			return all[first:rapid.IntRange(first, min(first+9, len(all))).Draw(t, "last")]
		}
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				list = listed(rapid.SliceOfNDistinct(rapid.SampledFrom(all), 0, 140, rapid.ID).Draw(t, "ids")...)
				list.Connected = rapid.IntRange(0, 4).Draw(t, "connected") > 0
				for i := range list.Devices {
					list.Devices[i].Healthy = i%7 > 0
				}
				slices.SortFunc(list.Devices, func(a, b model.Device) int { return cmpID(a.ID, b.ID) })
				p.Set(list)
			},
			"expire": func(*rapid.T) { list = model.Resource{}; p.Expire() },
			"hold": func(t *rapid.T) {
				pod, container := fmt.Sprint(
					rapid.IntRange(0, 2).Draw(t, "pod"),
				), rapid.SampledFrom([]string{"i", "m"}).
					Draw(t, "c")
				ids := some()
				p.Hold(pod, container, ids)
				for _, id := range ids {
					if holders[id] == nil {
						holders[id] = map[string]bool{}
					}
					holders[id][pod+container] = true
				}
			},
			"free": func(t *rapid.T) {
				pod, container := fmt.Sprint(
					rapid.IntRange(0, 2).Draw(t, "pod"),
				), rapid.SampledFrom([]string{"i", "m"}).
					Draw(t, "c")
				ids := some()
				p.Release(pod, container, ids)
				for _, id := range ids {
					delete(holders[id], pod+container)
				}
			},
			"withhold": func(*rapid.T) { cleared = map[string]bool{}; p.Withhold(nil) },
			"clear": func(*rapid.T) {
				ids := some()
				p.Clear(ids)
				for _, id := range ids {
					if cleared != nil {
						cleared[id] = true
					}
				}
			},
			"clear all": func(*rapid.T) { cleared = nil; p.ClearAll() },
			"": func(t *rapid.T) {
				var want []string
				allocatable := 0
				for _, d := range list.Devices {
					withheld := cleared != nil && !cleared[d.ID] && len(holders[d.ID]) == 0
					if d.Healthy && list.Connected && !withheld {
						allocatable++
						if len(holders[d.ID]) == 0 {
							want = append(want, d.ID)
						}
					}
				}
				if diff := cmp.Diff(want, available(p)); diff != "" {
					t.Fatalf("available (-want +got):\n%s", diff)
				}
				if c, a := p.Counts(); c != len(list.Devices) || a != allocatable {
					t.Fatalf("counts %d and %d, want %d and %d", c, a, len(list.Devices), allocatable)
				}
				maps.DeleteFunc(holders, func(_ string, by map[string]bool) bool { return len(by) == 0 })
				if p.Held() != len(holders) {
					t.Fatalf("%d held, want %d", p.Held(), len(holders))
				}
			},
		})
	})
}

func cmpID(a, b string) int {
	if a < b {
		return -1
	}
	return 1
}
