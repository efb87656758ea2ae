package mps

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/resource"
)

func TestDecide(t *testing.T) {
	now := time.Unix(1000, 0)
	want, hold := &Want{UUID: "GPU-1"}, &Want{UUID: "GPU-1", Hold: true}
	for name, tt := range map[string]struct {
		want *Want
		seen seen
		act  act
	}{
		"nothing is there and nothing is wanted":                       {nil, seen{}, rest},
		"a daemon that is wanted is started":                           {want, seen{due: now}, start},
		"but not before its time":                                      {want, seen{due: now.Add(1)}, rest},
		"and not for a GPU that cannot be used":                        {hold, seen{}, rest},
		"one that answers gets its limits":                             {want, seen{runs: true, answers: true}, limit},
		"and then there is nothing to do":                              {want, seen{runs: true, answers: true, limited: true}, rest},
		"with clients too":                                             {want, seen{runs: true, answers: true, limited: true, busy: true, serving: true}, rest},
		"one of another driver ends":                                   {want, seen{runs: true, answers: true, limited: true, stale: true}, quit},
		"when its clients have":                                        {want, seen{runs: true, answers: true, limited: true, stale: true, busy: true}, rest},
		"and has new limits until then":                                {want, seen{runs: true, answers: true, stale: true, busy: true}, limit},
		"one that is not wanted ends":                                  {nil, seen{runs: true, answers: true, recorded: true}, quit},
		"when its clients have, too":                                   {nil, seen{runs: true, answers: true, recorded: true, busy: true}, rest},
		"servers without clients are no reason to stay":                {nil, seen{runs: true, answers: true, recorded: true, serving: true}, quit},
		"what it leaves is cleared away":                               {nil, seen{recorded: true}, forget},
		"one that does not answer is asked again":                      {want, seen{runs: true, silent: patience - 1}, rest},
		"and ended at last":                                            {want, seen{runs: true, silent: patience}, end},
		"but not with servers, since they may have clients":            {want, seen{runs: true, silent: patience, serving: true}, rest},
		"one that does not answer and is not wanted is ended":          {nil, seen{runs: true, silent: patience}, end},
		"and not with servers":                                         {nil, seen{runs: true, silent: patience, serving: true}, rest},
		"the daemon of a GPU that cannot be used is left":              {hold, seen{runs: true, silent: patience}, rest},
		"and has its limits later":                                     {hold, seen{runs: true, answers: true}, rest},
		"what an earlier one has left is no reason not to start it":    {want, seen{recorded: true}, start},
		"a daemon that ended in time of a GPU that is not wanted ends": {nil, seen{recorded: true, due: now.Add(1)}, forget},
	} {
		t.Run(name, func(t *testing.T) {
			tt.seen.now = now
			if got := decide(tt.want, tt.seen); got != tt.act {
				t.Errorf("act %d, want %d", got, tt.act)
			}
		})
	}
}

func TestPausesGrow(t *testing.T) {
	var p pauses
	var got []time.Duration
	for range 11 {
		got = append(got, p.after(time.Second))
	}
	got = append(got, p.after(steady), p.after(0))
	ms := time.Millisecond
	want := []time.Duration{
		100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, 12800 * ms, 25600 * ms, 30 * time.Second,
		30 * time.Second, 100 * ms, 200 * ms,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestFailures(t *testing.T) {
	begin := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		after []time.Duration
		want  int
	}{
		"one":                        {[]time.Duration{0}, 1},
		"three in a tenth of second": {[]time.Duration{0, 50 * time.Millisecond, 100 * time.Millisecond}, 1},
		"many in a little more":      {[]time.Duration{0, 300 * time.Millisecond, 600 * time.Millisecond, failureTime}, 2},
		"three that take their time": {[]time.Duration{0, 5 * time.Second, 10 * time.Second}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			var f failures
			for _, d := range c.after {
				f.add(begin.Add(d))
			}
			if f.count != c.want {
				t.Errorf("counted %d, want %d", f.count, c.want)
			}
		})
	}
}

func TestWants(t *testing.T) {
	limits := &resource.MPSLimits{MemoryBytes: 1 << 30, ThreadPercent: 50}
	got := Wants([]resource.Resource{
		{Name: "b", Devices: []resource.Device{{UUID: "GPU-2", MPS: limits, Healthy: true}, {UUID: "GPU-2", MPS: limits, Healthy: true}}},
		{Name: "a", Devices: []resource.Device{{UUID: "GPU-3", Healthy: true}, {UUID: "GPU-1", MPS: limits, Reason: "lost"}}},
	})
	want := []Want{{UUID: "GPU-1", Limits: *limits, Hold: true}, {UUID: "GPU-2", Limits: *limits}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestJudge(t *testing.T) {
	half, third := resource.MPSLimits{MemoryBytes: 2 << 20}, resource.MPSLimits{MemoryBytes: 1 << 20}
	k := New(Options{})
	k.minders["GPU-1"] = &minder{ready: half}
	k.minders["GPU-2"] = &minder{reason: "it is gone"}
	k.minders["GPU-4"] = &minder{occupied: true}
	device := func(uuid string, l *resource.MPSLimits) resource.Device {
		return resource.Device{UUID: uuid, Parent: uuid, MPS: l, Healthy: true}
	}
	list := []resource.Resource{{Devices: []resource.Device{
		device("GPU-0", nil), device("GPU-1", &half), device("GPU-1", &third), device("GPU-2", &half), device("GPU-3", &half),
		{UUID: "GPU-2", MPS: &half, Reason: "lost"},
		device("GPU-4", nil),
		{UUID: "MIG-1", Parent: "GPU-4", Healthy: true},
	}}}
	var got []string
	for _, d := range k.Judge(list)[0].Devices {
		got = append(got, d.Reason)
		if d.Healthy != (d.Reason == "") {
			t.Errorf("healthy %t with the reason %q", d.Healthy, d.Reason)
		}
	}
	const still = "its GPU is still shared by MPS, until the last client has ended"
	want := []string{"", "", "its MPS control daemon is being given other limits", "it is gone", notYet, "lost", still, still}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if !list[0].Devices[3].Healthy {
		t.Error("it changed what it was given")
	}
}
