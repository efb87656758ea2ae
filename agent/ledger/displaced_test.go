package ledger

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

func TestAnotherPluginWithTheSameResourceIsNoticed(t *testing.T) {
	ours := map[string]map[string]bool{whole: {"GPU-a": true, "GPU-b": true}}
	theirs := map[string]map[string]bool{whole: {"GPU-a::0": true, "GPU-a::1": true}}
	for name, c := range map[string]struct {
		checks []map[string]map[string]bool // what the kubelet has at each check; nil is an error
		away   bool                         // the kubelet does not watch
		change int                          // the check after which a device becomes unhealthy, from 1
		want   bool
	}{
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
			var log bytes.Buffer
			var answer map[string]map[string]bool
			d := NewDisplaced(DisplacedOptions{
				Allocatable: func(context.Context) (map[string]map[string]bool, error) {
					if answer == nil {
						return nil, errors.New("no answer")
					}
					return answer, nil
				},
				Watched: func() bool { return !c.away },
				Changed: wake.New(), Log: slog.New(slog.NewTextHandler(&log, nil)),
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
			if got := d.Text(); (got != "") != c.want || c.want && !strings.Contains(log.String(), "other devices of "+whole) {
				t.Errorf("the text is %q, log:\n%s", got, log.String())
			}
		})
	}
}

// The text is logged when it begins and when it ends, and wakes the publisher each time.
func TestTheBeginAndTheEndOfADisplacementAreSeen(t *testing.T) {
	var log bytes.Buffer
	ours, theirs := map[string]bool{"GPU-a": true}, map[string]bool{"GPU-a::0": true}
	var answer map[string]bool
	d := NewDisplaced(DisplacedOptions{
		Allocatable: func(context.Context) (map[string]map[string]bool, error) {
			return map[string]map[string]bool{whole: answer}, nil
		},
		Watched: func() bool { return true },
		Changed: wake.New(), Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	d.Advertised([]resource.Resource{offer(whole, "GPU-a")})
	for i, step := range []struct {
		answer map[string]bool
		want   string // in the log; empty if nothing changes
	}{
		{ours, ""},
		{theirs, ""},
		{theirs, "the kubelet has other devices"},
		{theirs, ""},
		{ours, "the kubelet has the devices again"},
		{ours, ""},
	} {
		answer = step.answer
		log.Reset()
		d.check(t.Context())
		woken := len(d.opts.Changed) > 0
		if woken {
			<-d.opts.Changed
		}
		if woken != (step.want != "") || !strings.Contains(log.String(), step.want) || step.want == "" && log.Len() > 0 {
			t.Errorf("check %d: woken: %t; the log is %q, want %q", i, woken, &log, step.want)
		}
	}
}
