package dra

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

// observed counts the events of a driver.
type observed struct {
	mu     sync.Mutex
	counts map[string]int
}

var _ Observer = (*observed)(nil)

func (o *observed) add(event string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.counts == nil {
		o.counts = map[string]int{}
	}
	o.counts[event]++
}

// count returns how often there was an event, such as "prepare ok" or "write failed".
func (o *observed) count(event string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.counts[event]
}

func outcome(err error) string {
	if err != nil {
		return "failed"
	}
	return "ok"
}

func (o *observed) ClaimHandled(op Operation, err error, took time.Duration) {
	if took <= 0 {
		o.add(fmt.Sprint("a duration of ", took))
	}
	o.add(string(op) + " " + outcome(err))
}

func (o *observed) SliceWritten(err error) { o.add("write " + outcome(err)) }

func TestTheDriverIsObserved(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 2)
	awaitPublished(t, n.server, slicesOf(n.state))
	n.allocate(1, device("gpu-0"))
	n.mustPrepare(1)
	n.mustPrepare(1)    // again
	n.prepare(named(2)) // there is no such claim
	if prepared := n.driver.Prepared(); prepared != 1 {
		t.Errorf("%d claims are prepared, want 1", prepared)
	}
	n.unprepare(1)
	if prepared := n.driver.Prepared(); prepared != 0 {
		t.Errorf("%d claims are prepared, want none", prepared)
	}
	for event, want := range map[string]int{
		"prepare ok": 2, "prepare failed": 1, "unprepare ok": 1, "unprepare failed": 0, "write ok": 1, "write failed": 0,
		"a duration of 0s": 0,
	} {
		if got := n.observed.count(event); got != want {
			t.Errorf("%s: %d times, want %d", event, got, want)
		}
	}

	n.server.Instead(func(w http.ResponseWriter, q *http.Request) {
		if q.Method != http.MethodGet {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		_, _ = fmt.Fprint(w, `{"metadata": {"resourceVersion": "1"}, "items": []}`)
	})
	n.state = nodeOf(t, 1)
	n.publish()
	testenv.Eventually(t, "a slice that cannot be written is noticed",
		func() bool { return n.observed.count("write failed") > 0 })
}
