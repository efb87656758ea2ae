package ledger

import (
	"context"
	"errors"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

func TestAnotherPluginWithTheSameResourceIsNoticed(t *testing.T) {
	ours := map[string]map[string]bool{whole: {"GPU-a": true, "GPU-b": true}}
	theirs := map[string]map[string]bool{whole: {"GPU-a::0": true, "GPU-a::1": true}}
	none := map[string]map[string]bool{}
	for name, c := range map[string]struct {
		checks []map[string]map[string]bool // what the kubelet has at each check; nil is an error
		away   bool                         // the kubelet does not watch
		change int                          // the check after which a device becomes unhealthy, from 1
		want   bool
		lost   int // how often the resource is registered again
	}{
		"the kubelet has none": {
			checks: []map[string]map[string]bool{ours, none, none, none, ours}, lost: 2,
		},
		"the kubelet has none for a moment":      {checks: []map[string]map[string]bool{ours, none, ours, none, ours}},
		"the kubelet has the advertised devices": {checks: []map[string]map[string]bool{ours, ours, ours}},
		"the kubelet has others":                 {checks: []map[string]map[string]bool{ours, theirs, theirs}, want: true},
		"the kubelet has them a moment later":    {checks: []map[string]map[string]bool{theirs, ours, ours}},
		"others, and then ours again":            {checks: []map[string]map[string]bool{theirs, theirs, ours}},
		"the kubelet does not answer":            {checks: []map[string]map[string]bool{nil, nil, nil}},
		"the kubelet does not watch": {
			checks: []map[string]map[string]bool{theirs, theirs, theirs}, away: true,
		},
		"the kubelet still has an unhealthy one": {checks: []map[string]map[string]bool{ours, ours}, change: 1},
		"the kubelet keeps an unhealthy one": {
			checks: []map[string]map[string]bool{ours, ours, ours}, change: 1, want: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var answer map[string]map[string]bool
			var lost []string
			d := NewDisplaced(DisplacedOptions{
				Allocatable: func(context.Context) (map[string]map[string]bool, error) {
					if answer == nil {
						return nil, errors.New("no answer")
					}
					return answer, nil
				},
				Watched: func() bool { return !c.away },
				Lost:    func(name string) { lost = append(lost, name) },
				Changed: wake.New(),
			})
			devices := offer(whole, "GPU-a", "GPU-b")
			d.Advertised([]resource.Resource{devices})
			for i, list := range c.checks {
				answer = list
				d.check(t.Context())
				if i+1 == c.change {
					devices = offer(whole, "GPU-a", "GPU-b")
					devices.Devices[1].Healthy = false
					d.Advertised([]resource.Resource{devices})
				}
			}
			if got := d.Text(); (got != "") != c.want || c.want && !strings.Contains(got, "other devices of "+whole) {
				t.Errorf("the text is %q", got)
			}
			if len(lost) != c.lost || c.lost > 0 && lost[0] != whole {
				t.Errorf("%v are registered again, want %d times", lost, c.lost)
			}
		})
	}
}

// The begin and the end wake whoever logs the text.
func TestTheBeginAndTheEndOfADisplacementAreSeen(t *testing.T) {
	ours, theirs := map[string]bool{"GPU-a": true}, map[string]bool{"GPU-a::0": true}
	var answer map[string]bool
	d := NewDisplaced(DisplacedOptions{
		Allocatable: func(context.Context) (map[string]map[string]bool, error) {
			return map[string]map[string]bool{whole: answer}, nil
		},
		Watched: func() bool { return true },
		Lost:    func(string) { t.Error("a resource is lost") },
		Changed: wake.New(),
	})
	d.Advertised([]resource.Resource{offer(whole, "GPU-a")})
	for i, step := range []struct {
		answer map[string]bool
		want   bool // something changes
	}{
		{ours, false},
		{theirs, false},
		{theirs, true},
		{theirs, false},
		{ours, true},
		{ours, false},
	} {
		answer = step.answer
		d.check(t.Context())
		woken := len(d.opts.Changed) > 0
		if woken {
			<-d.opts.Changed
		}
		if woken != step.want {
			t.Errorf("check %d: woken: %t, want %t", i, woken, step.want)
		}
	}
}
