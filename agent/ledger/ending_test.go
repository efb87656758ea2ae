package ledger

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/resource"
)

// The kubelet forgets a pod that is deleted while its containers still run.
func TestAContainerThatTheKubeletHasForgotten(t *testing.T) {
	old := holder("x", whole, "GPU-a")
	again := holder("y", shared, "GPU-a::0")
	for name, c := range map[string]struct {
		used  bool
		err   error
		after []podresources.Holder // what the kubelet lists then
		wait  time.Duration
		held  bool
	}{
		"it still uses the device":                   {used: true, wait: time.Hour, held: true},
		"it does not use the device":                 {},
		"its use is unknown":                         {err: errors.New("no answer"), wait: gracePeriod, held: true},
		"its use is unknown, after the grace period": {err: errors.New("no answer"), wait: gracePeriod + 1},
		"another container may be what uses it":      {used: true, after: []podresources.Holder{again}, held: true},
		"another container, after the grace period": {
			used: true, after: []podresources.Holder{again}, wait: gracePeriod + 1,
		},
		"the kubelet lists it again, and it uses none": {after: []podresources.Holder{old}, held: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				holders := []podresources.Holder{old}
				l := newLedger(func() ([]podresources.Holder, error) { return holders, nil })
				l.opts.InUse = func(_ context.Context, uuid string) (bool, error) { return c.used && uuid == "GPU-a", c.err }
				offered := offer(shared, "GPU-a::0", "GPU-a::1")
				l.Offer([]resource.Resource{offered})
				holders = nil
				if _, err := l.Read(t.Context()); err != nil {
					t.Fatal(err)
				}
				expect(t, l, &offered.Devices[1], "pod default/x, which is ending, holds it as GPU-a")
				holders = c.after
				time.Sleep(c.wait)
				read(t, l)
				want := ""
				if c.held {
					want = "pod default/x"
				}
				expect(t, l, &offered.Devices[1], want)
			})
		})
	}
}

// A name that changes after the kubelet has forgotten its container is an old name too.
func TestAReloadAfterAContainerWasForgotten(t *testing.T) {
	holders := []podresources.Holder{holder("x", whole, "GPU-a")}
	l := newLedger(func() ([]podresources.Holder, error) { return holders, nil })
	l.opts.InUse = func(context.Context, string) (bool, error) { return true, nil }
	before, after := offer(whole, "GPU-a"), offer(shared, "GPU-a::0")
	l.Offer([]resource.Resource{before})
	holders = nil
	read(t, l)
	expect(t, l, &before.Devices[0], "") // the kubelet accounts for it
	l.Offer([]resource.Resource{after})
	expect(t, l, &after.Devices[0], "pod default/x, which is ending,")
}

func TestIDsThatNameNoGPU(t *testing.T) {
	for name, c := range map[string]struct {
		holders []podresources.Holder
		want    string
	}{
		"no container": {nil, ""},
		"our own IDs": {
			[]podresources.Holder{holder("x", whole, "GPU-a"), holder("y", whole, "GPU-b::1")}, "",
		},
		"a GPU that is gone":           {[]podresources.Holder{holder("x", whole, "GPU-z")}, ""},
		"a device of another resource": {[]podresources.Holder{holder("x", "example.com/nic", "eth0")}, ""},
		"another plugin's ID": {
			[]podresources.Holder{holder("x", whole, "nvidia0")}, `pod default/x holds "nvidia0" of ` + whole,
		},
		"more than fits a line, quoted": {[]podresources.Holder{holder("x", whole, strings.Repeat("\n", 99))}, `holds "\n\n`},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger(func() ([]podresources.Holder, error) { return c.holders, nil })
			l.Offer([]resource.Resource{offer(whole, "GPU-a", "GPU-b")})
			if woken := len(l.opts.Changed) > 0; c.want != "" && !woken {
				t.Error("the publisher is not woken")
			}
			got := l.Unrecognised()
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) || len(got) > 1000 {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}
