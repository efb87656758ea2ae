package plugin

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestLife tells what an endpoint does about what it sees. Times are in milliseconds since it began.
func TestLife(t *testing.T) {
	type event struct {
		at        int
		kubelet   uint64
		streaming bool
		// ended is the result of an announcement that ended before the look.
		ended  *outcome
		expect string // of announce, gained, lost, silent, in this order
	}
	taken := &outcome{told: true}
	failed := &outcome{told: true, err: errors.New("refused")}
	untold := &outcome{err: errors.New("connection refused")}
	cases := map[string]struct {
		finds  bool
		events []event
	}{
		"nothing is announced without a kubelet": {events: []event{
			{at: 0}, {at: 1000}, {at: 2000, kubelet: 1, expect: "announce "},
		}},
		"the usual life": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, ended: taken},
			{at: 2, kubelet: 1, streaming: true, expect: "gained "},
			{at: 60000, kubelet: 1, streaming: true},
		}},
		"the list is read before the answer to the announcement comes": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, streaming: true},
			{at: 2, kubelet: 1, streaming: true, ended: taken, expect: "gained "},
			{at: 20000, kubelet: 1, streaming: true},
		}},
		"the list is read, and the answer to the announcement is lost": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, streaming: true},
			{at: 5000, kubelet: 1, streaming: true, ended: failed, expect: "gained "},
			{at: 20000, kubelet: 1, streaming: true},
		}},
		"a kubelet before reads the list while this one does not hear": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 2, expect: "announce "},
			{at: 2, kubelet: 2, streaming: true},
			{at: 2, kubelet: 2, streaming: true, ended: untold},
			{at: 3, kubelet: 2, streaming: true, expect: "announce "},
			{at: 4, kubelet: 2, ended: taken},
			{at: 5, kubelet: 2, streaming: true, expect: "gained "},
		}},
		"a kubelet that refuses is asked again": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 0, kubelet: 1, ended: failed},
			{at: 1, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, ended: failed},
			{at: 1, kubelet: 1},
			{at: 3, kubelet: 1, expect: "announce "},
		}},
		"a kubelet that does not ask for the list is told again": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, ended: taken},
			{at: 10000, kubelet: 1},
			{at: 10001, kubelet: 1, expect: "silent "},
			{at: 10002, kubelet: 1, expect: "announce "},
		}},
		"a stream that ends is followed by an announcement": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, streaming: true, ended: taken, expect: "gained "},
			{at: 2, kubelet: 1, expect: "lost "},
			{at: 3, kubelet: 1, expect: "announce "},
		}},
		"a stream that ends with the kubelet waits for the next": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, streaming: true, ended: taken, expect: "gained "},
			{at: 2, expect: "lost "},
			{at: 30000},
			{at: 30001, kubelet: 2, expect: "announce "},
		}},
		"another kubelet is told, although the stream to the one before is open": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, streaming: true, ended: taken, expect: "gained "},
			{at: 2, kubelet: 2, streaming: true, expect: "announce lost "},
		}},
		"a kubelet whose socket was removed still reads the list": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 1, kubelet: 1, streaming: true, ended: taken, expect: "gained "},
			{at: 2, streaming: true},
		}},
		"another kubelet is told at once, however often the one before refused": {events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 0, kubelet: 1, ended: failed},
			{at: 9, kubelet: 1, expect: "announce "},
			{at: 9, kubelet: 1, ended: failed},
			{at: 9, kubelet: 2, expect: "announce "},
		}},
		"a kubelet that finds sockets is waited for before there is a new one": {finds: true, events: []event{
			{at: 0, kubelet: 1, expect: "announce "},
			{at: 0, kubelet: 1, ended: taken},
			{at: 1, kubelet: 1, streaming: true, expect: "gained "},
			{at: 2, kubelet: 1, expect: "lost "},
			{at: 9000, kubelet: 1},
			{at: 9001, kubelet: 1, streaming: true, expect: "gained "},
			{at: 9002, kubelet: 1, expect: "lost "},
			{at: 19002, kubelet: 1, expect: "silent "},
			{at: 19003, kubelet: 1, expect: "announce "},
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			l := life{grace: 10 * time.Second, finds: c.finds}
			for i, e := range c.events {
				now := begin.Add(time.Duration(e.at) * time.Millisecond)
				if e.ended != nil {
					l.ended(now, *e.ended)
				}
				do := l.look(seen{now: now, kubelet: e.kubelet, streaming: e.streaming})
				if diff := cmp.Diff(e.expect, words(do)); diff != "" {
					t.Errorf("event %d at %d ms (-want +got):\n%s", i+1, e.at, diff)
				}
			}
		})
	}
}

func words(s step) string {
	text := ""
	for _, w := range []struct {
		is   bool
		word string
	}{{s.announce, "announce "}, {s.gained, "gained "}, {s.lost, "lost "}, {s.silent, "silent "}} {
		if w.is {
			text += w.word
		}
	}
	return text
}

func TestPausesDouble(t *testing.T) {
	var b backoff
	for want := firstPause; want < 4*lastPause; want *= 2 {
		limit := min(want, lastPause)
		if got := b.pause(); got < limit/2 || got > limit {
			t.Errorf("a pause of %s, want %s to %s", got, limit/2, limit)
		}
	}
	b.reset()
	if got := b.pause(); got > firstPause {
		t.Errorf("the first pause after a success is %s, want at most %s", got, firstPause)
	}
}

func TestASteadyConnectionIsForgivenItsLoss(t *testing.T) {
	for name, c := range map[string]struct {
		lasted time.Duration
		first  bool
	}{"one that lasted": {steady, true}, "one that did not": {time.Second, false}} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			l := life{grace: time.Minute}
			for range 20 { // refusals
				l.look(seen{now: now, kubelet: 1})
				l.ended(now, outcome{told: true, err: errors.New("refused")})
				now = l.due
			}
			l.look(seen{now: now, kubelet: 1, streaming: true})
			now = now.Add(c.lasted)
			do := l.look(seen{now: now, kubelet: 1})
			if first := do.wake.Sub(now) <= firstPause; first != c.first {
				t.Errorf("the pause is %s", do.wake.Sub(now))
			}
		})
	}
}
