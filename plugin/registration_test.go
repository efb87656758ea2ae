package plugin

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestRegistration has the actions that follow from each observation. Times are in milliseconds.
func TestRegistration(t *testing.T) {
	type event struct {
		at        int
		kubelet   uint64 // the inode of its socket, or 0
		streaming bool
		// finished is the result of a Register call that finished before the observation.
		finished *outcome
		want     string // the actions, as text returns them
	}
	accepted := &outcome{delivered: true}
	refused := &outcome{delivered: true, err: errors.New("refused")}
	undelivered := &outcome{err: errors.New("connection refused")}
	cases := map[string]struct {
		discovered bool
		events     []event
	}{
		"without a kubelet nothing is registered": {events: []event{
			{at: 0}, {at: 1000}, {at: 2000, kubelet: 1, want: "register "},
		}},
		"a kubelet accepts and watches": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, finished: accepted},
			{at: 2, kubelet: 1, streaming: true, want: "watch began "},
			{at: 60000, kubelet: 1, streaming: true},
		}},
		"a kubelet watches before it answers the Register call": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, streaming: true},
			{at: 2, kubelet: 1, streaming: true, finished: accepted, want: "watch began "},
			{at: 20000, kubelet: 1, streaming: true},
		}},
		"a kubelet watches, and its answer to the Register call is lost": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, streaming: true},
			{at: 5000, kubelet: 1, streaming: true, finished: refused, want: "watch began "},
			{at: 20000, kubelet: 1, streaming: true},
		}},
		"an earlier kubelet watches while the call does not reach this one": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 2, want: "register "},
			{at: 2, kubelet: 2, streaming: true},
			{at: 2, kubelet: 2, streaming: true, finished: undelivered},
			{at: 3, kubelet: 2, streaming: true, want: "register "},
			{at: 4, kubelet: 2, finished: accepted},
			{at: 5, kubelet: 2, streaming: true, want: "watch began "},
		}},
		"a kubelet that refuses is called again after pauses": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 0, kubelet: 1, finished: refused},
			{at: 1, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, finished: refused},
			{at: 1, kubelet: 1},
			{at: 3, kubelet: 1, want: "register "},
		}},
		"a kubelet that accepts and does not watch is called again": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, finished: accepted},
			{at: 10000, kubelet: 1},
			{at: 10001, kubelet: 1, want: "not watched "},
			{at: 10002, kubelet: 1, want: "register "},
		}},
		"a stream that ends leads to a registration": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, streaming: true, finished: accepted, want: "watch began "},
			{at: 2, kubelet: 1, want: "watch ended "},
			{at: 3, kubelet: 1, want: "register "},
		}},
		"after a kubelet ended the next one is waited for": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, streaming: true, finished: accepted, want: "watch began "},
			{at: 2, want: "watch ended "},
			{at: 30000},
			{at: 30001, kubelet: 2, want: "register "},
		}},
		"a new kubelet is called, although the stream of the earlier one is open": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, streaming: true, finished: accepted, want: "watch began "},
			{at: 2, kubelet: 2, streaming: true, want: "register watch ended "},
		}},
		"a kubelet whose socket was removed still watches": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 1, kubelet: 1, streaming: true, finished: accepted, want: "watch began "},
			{at: 2, streaming: true},
		}},
		"a new kubelet is called at once, however often the earlier one refused": {events: []event{
			{at: 0, kubelet: 1, want: "register "},
			{at: 0, kubelet: 1, finished: refused},
			{at: 9, kubelet: 1, want: "register "},
			{at: 9, kubelet: 1, finished: refused},
			{at: 9, kubelet: 2, want: "register "},
		}},
		"a kubelet that discovers sockets and does not watch is shown a new one": {discovered: true, events: []event{
			{at: 0},
			{at: 1, streaming: true, want: "watch began "},
			{at: 2, want: "watch ended "},
			{at: 9000},
			{at: 9001, streaming: true, want: "watch began "},
			{at: 9002, want: "watch ended "},
			{at: 19002, want: "not watched "},
			{at: 19003, want: "register "},
			{at: 19003, finished: accepted},
			{at: 29002},
			{at: 29003, want: "not watched "},
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			r := newRegistration(begin, 10*time.Second, c.discovered)
			for i, e := range c.events {
				now := begin.Add(time.Duration(e.at) * time.Millisecond)
				if e.finished != nil {
					r.finished(now, *e.finished)
				}
				o := observation{now: now, kubelet: socketID{inode: e.kubelet}, streaming: e.streaming}
				if c.discovered {
					o.kubelet = anyKubelet
				}
				if diff := cmp.Diff(e.want, text(r.observe(o))); diff != "" {
					t.Errorf("event %d at %d ms (-want +got):\n%s", i+1, e.at, diff)
				}
			}
		})
	}
}

func text(do actions) string {
	text := ""
	for _, a := range []struct {
		set  bool
		name string
	}{{do.register, "register "}, {do.watchBegan, "watch began "}, {do.watchEnded, "watch ended "}, {do.notWatched, "not watched "}} {
		if a.set {
			text += a.name
		}
	}
	return text
}

func TestThePauseAfterASteadyStreamIsTheFirst(t *testing.T) {
	for name, c := range map[string]struct {
		watched time.Duration
		first   bool
	}{"a steady stream": {steady, true}, "a short stream": {time.Second, false}} {
		t.Run(name, func(t *testing.T) {
			now, kubelet := time.Now(), socketID{inode: 1}
			r := newRegistration(now, time.Minute, false)
			for range 20 {
				r.observe(observation{now: now, kubelet: kubelet})
				r.finished(now, outcome{delivered: true, err: errors.New("refused")})
				now = r.due
			}
			r.observe(observation{now: now, kubelet: kubelet, streaming: true})
			now = now.Add(c.watched)
			do := r.observe(observation{now: now, kubelet: kubelet})
			if first := do.next.Sub(now) == firstPause; first != c.first {
				t.Errorf("the pause is %s", do.next.Sub(now))
			}
		})
	}
}
