package mps

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/resource"
)

func TestDecide(t *testing.T) {
	now := time.Unix(1000, 0)
	want, hold := &Daemon{UUID: "GPU-1"}, &Daemon{UUID: "GPU-1", Hold: true}
	for name, tt := range map[string]struct {
		want   *Daemon
		state  state
		action action
	}{
		"no daemon, and none desired":            {nil, state{}, none},
		"a desired daemon is started":            {want, state{startAfter: now}, start},
		"not before its restart pause has ended": {want, state{startAfter: now.Add(1)}, none},
		"not for an unhealthy GPU":               {hold, state{}, none},
		"a daemon that answers gets its limits":  {want, state{runs: true, answers: true}, limit},
		"a daemon with its limits is ready":      {want, state{runs: true, answers: true, limited: true}, none},
		"with clients too": {
			want, state{runs: true, answers: true, limited: true, busy: true, serving: true}, none,
		},
		"a daemon of another driver ends": {want, state{runs: true, answers: true, limited: true, stale: true}, quit},
		"not while it has clients": {
			want, state{runs: true, answers: true, limited: true, stale: true, busy: true}, none,
		},
		"it gets new limits until then":     {want, state{runs: true, answers: true, stale: true, busy: true}, limit},
		"a daemon that is not desired ends": {nil, state{runs: true, answers: true, prepared: true}, quit},
		"not while it has clients, either":  {nil, state{runs: true, answers: true, prepared: true, busy: true}, none},
		"servers without clients do not matter": {
			nil, state{runs: true, answers: true, prepared: true, serving: true}, quit,
		},
		"a GPU without a desired daemon is released":  {nil, state{prepared: true}, release},
		"a daemon that does not answer has some time": {want, state{runs: true, silent: time.Second - 1}, none},
		"and is killed after that":                    {want, state{runs: true, silent: time.Second}, kill},
		"not with servers, which may have clients": {
			want, state{runs: true, silent: time.Second, serving: true}, none,
		},
		"a daemon that is not desired and does not answer is killed": {
			nil, state{runs: true, silent: time.Second}, kill,
		},
		"not with servers, either": {
			nil, state{runs: true, silent: time.Second, serving: true}, none,
		},
		"the daemon of an unhealthy GPU is left alone": {hold, state{runs: true, silent: time.Second}, none},
		"and gets its limits later":                    {hold, state{runs: true, answers: true}, none},
		"a GPU that was prepared before gets a daemon": {want, state{prepared: true}, start},
		"a GPU is released without a pause":            {nil, state{prepared: true, startAfter: now.Add(1)}, release},
	} {
		t.Run(name, func(t *testing.T) {
			tt.state.now, tt.state.patience = now, time.Second
			if got := decide(tt.want, tt.state); got != tt.action {
				t.Errorf("action %d, want %d", got, tt.action)
			}
		})
	}
}

func TestPausesBetweenRestartsGrow(t *testing.T) {
	w := &worker{}
	var got []time.Duration
	for range 11 {
		got = append(got, w.nextPause(time.Second))
	}
	got = append(got, w.nextPause(steadyTime), w.nextPause(0))
	ms := time.Millisecond
	want := []time.Duration{
		100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, 12800 * ms, 25600 * ms,
		30 * time.Second, 30 * time.Second, 100 * ms, 200 * ms,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestDaemons(t *testing.T) {
	limits := &resource.MPSLimits{MemoryBytes: 1 << 30, ThreadPercent: 50}
	got := Daemons([]resource.Resource{
		{
			Name: "b",
			Devices: []resource.Device{
				{UUID: "GPU-2", MPS: limits, Healthy: true},
				{UUID: "GPU-2", MPS: limits, Healthy: true},
			},
		},
		{
			Name:    "a",
			Devices: []resource.Device{{UUID: "GPU-3", Healthy: true}, {UUID: "GPU-1", MPS: limits, Reason: "lost"}},
		},
	})
	want := []Daemon{{UUID: "GPU-1", Limits: *limits, Hold: true}, {UUID: "GPU-2", Limits: *limits}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestProblem(t *testing.T) {
	half, third := resource.MPSLimits{MemoryBytes: 2 << 20}, resource.MPSLimits{MemoryBytes: 1 << 20}
	s := New(Options{})
	s.workers["GPU-1"] = &worker{ready: half}
	s.workers["GPU-2"] = &worker{reason: "it is gone"}
	s.workers["GPU-4"] = &worker{occupied: true}
	const occupied = "its GPU is still shared by MPS until the last client has ended"
	for name, c := range map[string]struct {
		device resource.Device
		want   string
	}{
		"a GPU that is not shared": {resource.Device{UUID: "GPU-0", Parent: "GPU-0"}, ""},
		"a daemon that is ready":   {resource.Device{UUID: "GPU-1", Parent: "GPU-1", MPS: &half}, ""},
		"a daemon with other limits": {
			resource.Device{UUID: "GPU-1", Parent: "GPU-1", MPS: &third},
			"the limits of its MPS control daemon are being changed",
		},
		"a daemon with a problem": {resource.Device{UUID: "GPU-2", Parent: "GPU-2", MPS: &half}, "it is gone"},
		"a GPU whose daemon is new": {
			resource.Device{UUID: "GPU-3", Parent: "GPU-3", MPS: &half}, starting,
		},
		"a GPU that is no longer shared":        {resource.Device{UUID: "GPU-4", Parent: "GPU-4"}, occupied},
		"a MIG device of a GPU that was shared": {resource.Device{UUID: "MIG-1", Parent: "GPU-4"}, occupied},
	} {
		if got := s.Problem(&c.device); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
