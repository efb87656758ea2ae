package lease

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const gib40, gib80 = 40 << 30, 80 << 30

// device makes a device of nvidia.com/gpu, like "a0 free", near a NUMA node.
func device(id string, free bool, numa int, info Info) Device {
	return Device{ID: id, Resource: "nvidia.com/gpu", Free: free, NUMA: []int{numa}, Info: info}
}

var (
	a100 = Info{Model: "NVIDIA A100-SXM4-40GB", MemoryBytes: gib40}
	h100 = Info{Model: "NVIDIA H100 80GB HBM3", MemoryBytes: gib80}
	mig  = Info{Model: "NVIDIA H100 80GB HBM3", Profile: "1g.10gb", MemoryBytes: 10 << 30}
)

// with returns the devices with a change of some of them, by ID.
func with(devices []Device, change func(*Device), ids ...string) []Device {
	devices = slices.Clone(devices)
	for i := range devices {
		if len(ids) == 0 || slices.Contains(ids, devices[i].ID) {
			change(&devices[i])
		}
	}
	return devices
}

func held1(d *Device)  { d.Free = false }
func broken(d *Device) { d.Free, d.Broken = false, true }
func busy(d *Device)   { d.Busy, d.Users = "process 7 uses it", []int{7} }
func unknown(d *Device) {
	d.Info = Info{}
}

func replicas(resource string) func(*Device) {
	return func(d *Device) { d.Resource = resource }
}

// mixed are two A100s on node 0, two H100s on node 1, and two MIG devices on node 0.
var mixed = []Device{
	device("a0", true, 0, a100), device("a1", true, 0, a100), device("h0", true, 1, h100), device("h1", true, 1, h100),
	{ID: "m0", Resource: "nvidia.com/mig-1g.10gb", Free: true, NUMA: []int{0}, Info: mig},
	{ID: "m1", Resource: "nvidia.com/mig-1g.10gb", Free: true, NUMA: []int{0}, Info: mig},
}

// shared are two devices with three replicas each.
var shared = []Device{
	device("u0::0", true, 0, h100), device("u0::1", true, 0, h100), device("u0::2", true, 0, h100),
	device("u1::0", true, 0, h100), device("u1::1", true, 0, h100), device("u1::2", true, 0, h100),
}

func TestChoose(t *testing.T) {
	for name, c := range map[string]struct {
		devices []Device
		r       Request
		want    string // the IDs, or empty
	}{
		"any whole device is none of MIG":            {mixed, Request{Count: 1}, "a0 a1 h0 h1"},
		"as many as there are":                       {mixed, Request{Count: 4}, "a0 a1 h0 h1"},
		"more than there are":                        {mixed, Request{Count: 5}, ""},
		"none is there":                              {nil, Request{Count: 1}, ""},
		"a model, in any case":                       {mixed, Request{Count: 2, Model: "h100"}, "h0 h1"},
		"a model of which MIG devices are too":       {mixed, Request{Count: 3, Model: "H100"}, ""},
		"a model that nobody has":                    {mixed, Request{Count: 1, Model: "B200"}, ""},
		"a profile":                                  {mixed, Request{Count: 2, Profile: "1g.10gb"}, "m0 m1"},
		"a part of a profile is another one":         {mixed, Request{Count: 1, Profile: "1g"}, ""},
		"a profile of another model":                 {mixed, Request{Count: 1, Profile: "1g.10gb", Model: "A100"}, ""},
		"memory that all have":                       {mixed, Request{Count: 1, MinMemory: gib40}, "a0 a1 h0 h1"},
		"memory that some have":                      {mixed, Request{Count: 1, MinMemory: gib40 + 1}, "h0 h1"},
		"memory that none has":                       {mixed, Request{Count: 1, MinMemory: gib80 + 1}, ""},
		"a resource of MIG devices, with no profile": {mixed, Request{Count: 1, Resource: "nvidia.com/mig-1g.10gb"}, "m0 m1"},
		"a resource that there is not":               {mixed, Request{Count: 1, Resource: "nvidia.com/g"}, ""},
		"one NUMA node, that with the fewest":        {mixed, Request{Count: 1, SameNUMA: true}, "a0 a1"},
		"one NUMA node, which has too few":           {mixed, Request{Count: 3, SameNUMA: true}, ""},
		"one NUMA node, broken up already": {
			slices.DeleteFunc(slices.Clone(mixed), func(d Device) bool { return d.ID == "h0" }),
			Request{Count: 1, SameNUMA: true},
			"h1",
		},
		"one NUMA node, and devices near none": {
			with(mixed, func(d *Device) { d.NUMA = nil }), Request{Count: 1, SameNUMA: true}, "",
		},
		"devices near two NUMA nodes": {
			with(mixed, func(d *Device) { d.NUMA = []int{0, 1} }), Request{Count: 4, SameNUMA: true}, "a0 a1 h0 h1",
		},
		"replicas beside whole devices are left out": {
			slices.Concat(mixed, with(shared, replicas("r"))), Request{Count: 4}, "a0 a1 h0 h1",
		},
		"more than there are whole ones, and replicas do not help": {
			slices.Concat(mixed, with(shared, replicas("r"))), Request{Count: 5}, "",
		},
		"replicas beside whole devices, by their resource": {
			slices.Concat(mixed, with(shared, replicas("r"))), Request{Count: 2, Resource: "r"}, "u0::0 u1::0",
		},
		"devices by their names":                      {mixed, Request{Count: 2, Devices: []string{"h1", "a0"}}, "a0 h1"},
		"a replica by the name of its device":         {shared, Request{Count: 1, Devices: []string{"u1"}}, "u1::0"},
		"a replica by its name":                       {shared, Request{Count: 1, Devices: []string{"u1::2"}}, "u1::2"},
		"devices by their names, of two resources":    {mixed, Request{Count: 2, Devices: []string{"h1", "m0"}}, ""},
		"replicas of a device count once":             {shared, Request{Count: 2}, "u0::0 u1::0"},
		"more devices than have replicas":             {shared, Request{Count: 3}, ""},
		"near one NUMA node, replicas count once too": {shared, Request{Count: 3, SameNUMA: true}, ""},
		"without descriptors, any device":             {with(mixed, unknown), Request{Count: 1}, "a0 a1 h0 h1"},
		"without descriptors, no model is known":      {with(mixed, unknown), Request{Count: 1, Model: "H100"}, ""},
		"without descriptors, no memory is known":     {with(mixed, unknown), Request{Count: 1, MinMemory: 1}, ""},
		"without descriptors, no profile is known":    {with(mixed, unknown), Request{Count: 1, Profile: "1g.10gb"}, ""},
		"all of one resource: the first with enough": {
			with(mixed, replicas("b"), "h0", "h1", "a1"), Request{Count: 3}, "a1 h0 h1",
		},
		"no two resources together":                     {with(mixed, replicas("b"), "h0", "h1"), Request{Count: 3}, ""},
		"the first resource by name, if several can do": {with(mixed, replicas("b"), "h0"), Request{Count: 1}, "h0"},
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			if choice := c.r.choose(c.r.candidates(c.devices)); choice != nil {
				got = strings.Join(choice.among, " ")
			}
			if got != c.want {
				t.Errorf("chosen from %q, want %q", got, c.want)
			}
		})
	}
}

// within has devices held for so many minutes at most.
func within(minutes int) func(*Device) {
	return func(d *Device) { d.Free, d.Within = false, time.Duration(minutes)*time.Minute }
}

// limited is a request for devices whose command has ended after so many minutes.
func limited(minutes int, r Request) demand { return demand{r, time.Duration(minutes) * time.Minute} }

func TestNext(t *testing.T) {
	any := func(n int) demand { return demand{Request: Request{Count: n}} }
	one, two := any(1), any(2)
	want := func(r Request) demand { return demand{Request: r} }
	for name, c := range map[string]struct {
		devices []Device
		waiting []demand
		want    string // the index and the IDs, and whether it passes
	}{
		"nobody waits":                      {mixed, nil, "none"},
		"the first, if all can have theirs": {mixed, []demand{one, two}, "0 a0 a1 h0 h1"},
		"none is free":                      {with(mixed, held1), []demand{one, two}, "none"},
		"a small one does not pass a large one": {
			with(mixed, held1, "a0"), []demand{any(4), one}, "none",
		},
		"who wants other devices passes": {
			with(mixed, held1, "a0"),
			[]demand{want(Request{Count: 2, Model: "A100"}), want(Request{Count: 1, Model: "H100"})},
			"1 h0 h1",
		},
		"who wants any gets one that the first cannot use": {
			with(mixed, held1, "a0"), []demand{want(Request{Count: 2, Model: "A100"}), one}, "1 h0 h1",
		},
		"the third passes two, with what neither can use": {
			with(mixed, held1, "a0", "h0"),
			[]demand{
				want(Request{Count: 2, Model: "A100"}), want(Request{Count: 2, MinMemory: gib80}),
				want(Request{Count: 1, Profile: "1g.10gb"}),
			},
			"2 m0 m1",
		},
		"the third does not pass the second": {
			with(mixed, held1, "a0", "h0"),
			[]demand{want(Request{Count: 2, Model: "A100"}), want(Request{Count: 2, Model: "H100"}), one},
			"none",
		},
		"who wants any gets none that is busy": {with(mixed, busy, "a0", "h0"), []demand{one}, "0 a1 h1"},
		"a busy device holds back only who needs it": {
			with(mixed, busy, "a0"), []demand{any(4), two}, "1 a1 h0 h1",
		},
		"root gets one that is not busy": {
			with(mixed, busy, "a0", "h0"), []demand{want(Request{Count: 1, AllowBusy: true})}, "0 a1 h1",
		},
		"root gets busy ones if there are too few others": {
			with(mixed, busy, "a0", "h0"), []demand{want(Request{Count: 3, AllowBusy: true})}, "0 a0 a1 h0 h1",
		},
		"root gets no broken ones": {
			with(with(mixed, busy, "a0"), broken, "h0", "h1"), []demand{want(Request{Count: 3, AllowBusy: true})}, "none",
		},
		"a busy device is leased for the process that uses it": {
			with(mixed, busy, "a0", "h0"), []demand{want(Request{Count: 1, Devices: []string{"h0"}, pid: 7})}, "0 h0",
		},
		"a busy device is not leased for another process": {
			with(mixed, busy, "a0", "h0"), []demand{want(Request{Count: 1, Devices: []string{"h0"}, pid: 8})}, "none",
		},
		"a busy device is leased for any process if root asks": {
			with(mixed, busy, "a0", "h0"), []demand{want(Request{Count: 1, Devices: []string{"h0"}, trusted: true})}, "0 h0",
		},
		"a broken device holds back only who needs it": {
			with(mixed, broken, "a0"), []demand{any(4), two}, "1 a1 h0 h1",
		},
		"a broken and a held device: who can do without the broken one holds back": {
			with(with(mixed, broken, "a0"), held1, "a1"), []demand{any(3), two}, "none",
		},
		"a device that could not be prepared, and is left alone, is no broken one": {
			with(mixed, held1, "a0"), []demand{any(4), two}, "none",
		},
		"another replica of a device is free": {with(shared, held1, "u0::0", "u1::0"), []demand{two}, "0 u0::1 u1::1"},
		"only replicas of one device are free": {
			with(shared, held1, "u0::0", "u0::1", "u0::2"), []demand{two, one}, "none",
		},
		"one NUMA node: free devices near others are kept for it too": {
			with(mixed, held1, "a0", "h0"), []demand{want(Request{Count: 2, SameNUMA: true}), one}, "none",
		},
		"who ends before the first can begin passes": {
			with(mixed, within(60), "a0", "h0"), []demand{any(4), limited(60, Request{Count: 2})}, "1 a1 h1, passing",
		},
		"who ends later does not": {
			with(mixed, within(60), "a0", "h0"), []demand{any(4), limited(61, Request{Count: 2})}, "none",
		},
		"nor does who has no limit": {
			with(mixed, within(60), "a0", "h0"), []demand{any(4), two}, "none",
		},
		"the first can begin when the last of those that it needs is free": {
			with(with(mixed, within(60), "a0"), within(30), "h0"),
			[]demand{any(4), limited(50, Request{Count: 1})},
			"1 a1 h1, passing",
		},
		"the first can begin when enough are free": {
			with(with(mixed, within(60), "a0"), within(30), "h0"), []demand{any(3), limited(50, Request{Count: 1})}, "none",
		},
		"when the first can begin is not known": {
			with(with(mixed, held1, "a0"), within(60), "h0"), []demand{any(4), limited(1, Request{Count: 1})}, "none",
		},
		"it need not be known of all": {
			with(with(mixed, held1, "a0"), within(60), "h0"),
			[]demand{any(3), limited(60, Request{Count: 1})},
			"1 a1 h1, passing",
		},
		"a broken device does not come back": {
			with(with(with(mixed, within(60), "a1"), within(10), "a0"), broken, "a0"),
			[]demand{any(3), limited(20, Request{Count: 2})},
			"1 h0 h1, passing",
		},
		"the third passes only if it ends before both": {
			with(with(mixed, within(60), "a0"), within(30), "h0"),
			[]demand{
				want(Request{Count: 2, Model: "A100"}), want(Request{Count: 2, Model: "H100"}), limited(50, Request{Count: 1}),
			},
			"2 a1, passing",
		},
		"the second, which waits for the first only, does not hold back the third": {
			with(mixed, within(60), "a0"), []demand{any(4), two, limited(60, Request{Count: 1})}, "2 a1 h0 h1, passing",
		},
		"when the second can begin is not known, since the first needs its devices": {
			with(mixed, held1, "a0"), []demand{any(4), two, limited(1, Request{Count: 1})}, "none",
		},
		"without passing, if it can have others": {
			with(mixed, within(60), "a0"),
			[]demand{want(Request{Count: 2, Model: "A100"}), limited(10, Request{Count: 1})},
			"1 h0 h1",
		},
		"near one NUMA node, the first waits for that": {
			with(with(mixed, within(10), "a0"), within(60), "h0"),
			[]demand{want(Request{Count: 2, SameNUMA: true}), limited(20, Request{Count: 1})},
			"none",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := "none"
			if i, choice := next(c.waiting, c.devices); choice != nil {
				got = fmt.Sprint(i, " ", strings.Join(choice.among, " "))
				if choice.passes {
					got += ", passing"
				}
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestPossible(t *testing.T) {
	for name, c := range map[string]struct {
		devices []Device
		r       Request
		want    string // the error, or empty
	}{
		"all are held":   {with(mixed, held1), Request{Count: 4}, ""},
		"all are broken": {with(mixed, broken), Request{Count: 4}, ""},
		"more than there are": {mixed, Request{Count: 5}, "this host cannot give 5 devices: it has " +
			"2 x nvidia.com/gpu (NVIDIA A100-SXM4-40GB, 40.0 GiB), 2 x nvidia.com/gpu (NVIDIA H100 80GB HBM3, 80.0 GiB), " +
			"2 x nvidia.com/mig-1g.10gb (NVIDIA H100 80GB HBM3, 1g.10gb, 10.0 GiB)"},
		"MIG devices that no plugin lists": {
			shared,
			Request{Count: 1, Profile: "1g.10gb"},
			"this host cannot give 1 device with the profile 1g.10gb: no MIG devices are listed, which gpu-cdi-plugin " +
				"does with mig-strategy mixed or single; it has 2 x nvidia.com/gpu (NVIDIA H100 80GB HBM3, 80.0 GiB)",
		},
		"a resource of MIG devices, and all GPUs are in MIG mode": {
			nil,
			Request{Count: 1, Resource: "nvidia.com/mig-1g.10gb"},
			"this host cannot give 1 device of the resource nvidia.com/mig-1g.10gb: no MIG devices are listed, which " +
				"gpu-cdi-plugin does with mig-strategy mixed or single; no device plugin lists devices",
		},
		"a MIG device by its UUID": {
			with(shared, unknown),
			Request{Count: 1, Devices: []string{"MIG-1"}},
			"this host cannot give 1 device (MIG-1): no MIG devices are listed, which gpu-cdi-plugin does with " +
				"mig-strategy mixed or single; it has 2 x nvidia.com/gpu",
		},
		"another profile than those of the host": {
			mixed[4:],
			Request{Count: 1, Profile: "7g.80gb"},
			"this host cannot give 1 device with the profile 7g.80gb: it has " +
				"2 x nvidia.com/mig-1g.10gb (NVIDIA H100 80GB HBM3, 1g.10gb, 10.0 GiB)",
		},
		"replicas count once": {
			shared,
			Request{Count: 3},
			"this host cannot give 3 devices: it has 2 x nvidia.com/gpu (NVIDIA H100 80GB HBM3, 80.0 GiB)",
		},
		"without descriptors": {
			with(shared, unknown),
			Request{Count: 1, Model: "H100", MinMemory: gib40, SameNUMA: true},
			`this host cannot give 1 device of a model "H100" with 40.0 GiB near one NUMA node: it has 2 x nvidia.com/gpu`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.r.possible(c.devices)
			if got := fmt.Sprint(err); c.want == "" && err != nil || c.want != "" && got != c.want {
				t.Errorf("got %s, want %q", got, c.want)
			}
			if err != nil && !errors.Is(err, ErrImpossible) {
				t.Error("it is not ErrImpossible")
			}
		})
	}
}

func TestInvalidRequests(t *testing.T) {
	for name, c := range map[string]struct {
		r     Request
		valid bool
	}{
		"one device":              {Request{Count: 1, Model: "H100 80GB"}, true},
		"none":                    {Request{}, false},
		"less than none":          {Request{Count: -1}, false},
		"more than any host has":  {Request{Count: maxCount + 1}, false},
		"a long model":            {Request{Count: 1, Model: strings.Repeat("x", maxText+1)}, false},
		"a resource with a bell":  {Request{Count: 1, Resource: "a\a"}, false},
		"a profile of two lines":  {Request{Count: 1, Profile: "1g\n2g"}, false},
		"a model that is no text": {Request{Count: 1, Model: "\xff"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.r.check(); (err == nil) != c.valid || err != nil && !errors.Is(err, ErrInvalid) {
				t.Errorf("%v", err)
			}
		})
	}
}

// queued is a request of a random history.
type queued struct {
	demand

	number int
	has    []int         // indices of its devices
	ends   time.Duration // when its command has ended at the latest; 0 means never
}

// history is a random history of a queue.
type history struct {
	t        *testing.T
	random   *rand.Rand
	devices  []Device
	holder   map[int]*queued // by the index of the device
	waiting  []*queued
	number   int
	arriving bool // whether requests arrive
	now      time.Duration
}

// pick returns a random request, mostly a small one.
func (h *history) pick() Request {
	r := Request{Count: 1 + h.random.IntN(1+h.random.IntN(4)), SameNUMA: h.random.IntN(6) == 0}
	switch h.random.IntN(8) {
	case 0:
		r.Model = "A100"
	case 1:
		r.Model = "H100"
	case 2:
		r.Profile = "1g.10gb"
	case 3:
		r.MinMemory = gib80
	case 4:
		r.Resource = "nvidia.com/gpu"
	}
	return r
}

// settle gives devices until nobody can have any, and checks each time that nobody was passed unduly.
func (h *history) settle() {
	for {
		var demands []demand
		for _, w := range h.waiting {
			demands = append(demands, w.demand)
		}
		h.setWithin()
		i, c := next(demands, h.devices)
		if c == nil {
			return
		}
		w := h.waiting[i]
		earlier := slices.Clone(h.waiting[:i])
		if w.takes > 0 && i > 0 { // it may pass; when others than the first can be met depends on those before them
			earlier = slices.DeleteFunc(earlier[:1], func(e *queued) bool { return w.takes <= e.within(h.devices, nil) })
		}
		h.random.Shuffle(len(c.among), func(i, j int) { c.among[i], c.among[j] = c.among[j], c.among[i] })
		for _, id := range c.among[:w.Count] { // the manager may choose any of them
			at := slices.IndexFunc(h.devices, func(d Device) bool { return d.ID == id && d.Resource == c.resource })
			d := &h.devices[at]
			h.check(w, earlier, at)
			h.holder[at], d.Free = w, false
			w.has = append(w.has, at)
		}
		if w.takes > 0 {
			w.ends = h.now + w.takes
		}
		h.waiting = slices.Delete(h.waiting, i, i+1)
	}
}

// setWithin sets when the devices are free at the latest.
func (h *history) setWithin() {
	for at := range h.devices {
		h.devices[at].Within = 0
		if w := h.holder[at]; w != nil && w.ends > 0 {
			h.devices[at].Within = w.ends - h.now
		}
	}
}

// check fails the test if a request may not have a device, since it is another's or an earlier request could use it.
func (h *history) check(w *queued, earlier []*queued, at int) {
	h.t.Helper()
	d := &h.devices[at]
	if other := h.holder[at]; other != nil || !d.Free {
		h.t.Fatalf("%s is given to %d, and %v has it", d.ID, w.number, other)
	}
	if !w.suits(d) {
		h.t.Fatalf("%s is given to %s", d.ID, &w.Request)
	}
	for _, has := range w.has {
		if h.devices[has].device() == d.device() || h.devices[has].Resource != d.Resource {
			h.t.Fatalf("%s and %s are given to one request", h.devices[has].ID, d.ID)
		}
	}
	for _, e := range earlier {
		usable := slices.DeleteFunc(e.candidates(h.devices), func(d Device) bool { return d.Broken || d.Busy != "" })
		could := slices.ContainsFunc(usable, func(o Device) bool { return o.ID == d.ID })
		if could && e.choose(usable) != nil {
			h.t.Fatalf("%s is given to %d, and %d could use it and came earlier", d.ID, w.number, e.number)
		}
	}
}

// end ends a request that has devices.
func (h *history) end(w *queued) {
	for _, at := range w.has {
		delete(h.holder, at)
		h.devices[at].Free = !h.devices[at].Broken
	}
}

// holders are the requests that have devices, in the order of their arrival.
func (h *history) holders() []*queued {
	var list []*queued
	for _, w := range h.holder {
		if !slices.Contains(list, w) {
			list = append(list, w)
		}
	}
	slices.SortFunc(list, func(a, b *queued) int { return a.number - b.number })
	return list
}

// step makes a random change.
func (h *history) step() {
	holders := h.holders()
	switch n := h.random.IntN(10); {
	case n < 4 && h.arriving:
		h.number++
		takes := time.Duration(max(0, h.random.IntN(20)-8)) * time.Minute
		if w := (&queued{demand: demand{h.pick(), takes}, number: h.number}); w.possible(h.devices) == nil {
			h.waiting = append(h.waiting, w)
		}
	case n < 7 && len(holders) > 0:
		h.end(holders[h.random.IntN(len(holders))])
	case n == 7 && len(h.waiting) > 0: // it gives up
		i := h.random.IntN(len(h.waiting))
		h.waiting = slices.Delete(h.waiting, i, i+1)
	case n == 8: // a device breaks or is repaired
		at := h.random.IntN(len(h.devices))
		d := &h.devices[at]
		d.Broken = !d.Broken
		d.Free = !d.Broken && h.holder[at] == nil
	case n == 9: // a device cannot be prepared, or can again
		at := h.random.IntN(len(h.devices))
		h.devices[at].Free = !h.devices[at].Free && !h.devices[at].Broken && h.holder[at] == nil
	}
	h.settle()
}

func newHistory(t *testing.T, seed uint64) *history {
	t.Helper()
	h := &history{
		t: t, random: rand.New(rand.NewPCG(seed, 1)), devices: slices.Clone(mixed), holder: map[int]*queued{}, arriving: true,
	}
	h.devices = append(h.devices, with(shared, replicas("nvidia.com/gpu.shared"))...)
	return h
}

// In any history of arrivals, ends, refusals and broken devices no device has two holders, and nobody passes an earlier
// request with a device that this one could use.
func TestHistoriesOfTheQueue(t *testing.T) {
	for seed := range uint64(50) {
		h := newHistory(t, seed)
		for range 200 {
			h.step()
		}
	}
}

// Whoever waits gets his devices in the end, while others keep arriving: when each of those who have devices, and came
// before, has ended, he has his.
func TestNobodyStarves(t *testing.T) {
	for seed := range uint64(50) {
		h := newHistory(t, seed)
		for range 60 {
			h.step()
		}
		for i := range h.devices { // all are repaired
			h.devices[i].Broken, h.devices[i].Free = false, h.holder[i] == nil
		}
		h.settle()
		if len(h.waiting) == 0 {
			continue
		}
		last := h.waiting[len(h.waiting)-1]
		for round := 0; slices.Contains(h.waiting, last); round++ {
			if round > 10*len(h.devices)+10*last.number {
				t.Fatalf("seed %d: %s waits while others come and go", seed, &last.Request)
			}
			for range 3 { // greedy ones arrive all the time
				h.number++
				h.waiting = append(h.waiting, &queued{demand: demand{Request: Request{Count: 1}}, number: h.number})
			}
			if holders := h.holders(); len(holders) > 0 { // who came last ends first: the worst order
				h.end(holders[len(holders)-1-round%len(holders)])
			}
			h.settle()
		}
	}
}

// Whoever is first in the queue has his devices when those have ended of whom that was known, whoever passes him.
func TestNobodyWaitsLongerForThoseWhoPass(t *testing.T) {
	passed := 0
	for seed := range uint64(50) {
		h := newHistory(t, seed)
		due := map[int]time.Duration{} // when a request has its devices at the latest, by its number
		for range 300 {
			h.now += time.Minute
			for _, w := range h.holders() {
				if w.ends > 0 && w.ends <= h.now || h.random.IntN(10) == 0 { // some end earlier
					h.end(w)
				}
			}
			takes := time.Duration(h.random.IntN(20)) * time.Minute
			w := &queued{demand: demand{h.pick(), takes}, number: h.number}
			if h.number++; len(h.waiting) < 8 && h.random.IntN(2) == 0 && w.possible(h.devices) == nil {
				h.waiting = append(h.waiting, w)
			}
			before := slices.Clone(h.waiting)
			h.settle()
			for i, w := range before {
				if i > 0 && len(w.has) > 0 && len(before[0].has) == 0 {
					passed++
				}
			}
			if len(h.waiting) == 0 {
				continue
			}
			first := h.waiting[0]
			if at, is := due[first.number]; is && h.now >= at {
				t.Fatalf("seed %d: %s waits at %v, and could have had its devices at %v", seed, &first.Request, h.now, at)
			}
			h.setWithin()
			if within := first.within(h.devices, nil); within > 0 {
				if at, is := due[first.number]; !is || h.now+within < at {
					due[first.number] = h.now + within
				}
			}
		}
	}
	if passed < 100 {
		t.Errorf("only %d passed", passed)
	}
}

func TestARequestIsNamedInWords(t *testing.T) {
	r := Request{Count: 2, Resource: "r", Model: "H100", Profile: "1g", MinMemory: gib40, SameNUMA: true}
	want := `2 devices of the resource r of a model "H100" with the profile 1g with 40.0 GiB near one NUMA node`
	if diff := cmp.Diff(want, r.String()); diff != "" {
		t.Error(diff)
	}
}
