package kubeapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/health"
)

// fakeAPI counts requests and keeps what was sent last of each Event.
type fakeAPI struct {
	sync.Mutex
	requests int
	counts   map[string]int // by the name of the Event
	err      error
}

func (f *fakeAPI) do(_ context.Context, method, path, _ string, object any) error {
	f.Lock()
	defer f.Unlock()
	f.requests++
	if f.err != nil {
		return f.err
	}
	body := object.(map[string]any)
	name := path[strings.LastIndex(path, "/")+1:]
	if method == http.MethodPost {
		name = body["metadata"].(map[string]string)["name"]
	}
	f.counts[name] = body["count"].(int)
	return nil
}

// newTestReporter returns a reporter whose requests an API server in memory answers. It runs until the test ends.
func newTestReporter(t *testing.T, log *slog.Logger) (*Reporter, *fakeAPI) {
	api := &fakeAPI{counts: map[string]int{}}
	r := &Reporter{
		log: log, timing: defaultTiming, reported: lastReported{},
		events:     &events{do: api.do, node: "n", timing: defaultTiming, log: log, wake: make(chan struct{}, 1)},
		conditions: &conditions{do: noRequest, node: "n", timing: defaultTiming, wake: make(chan struct{}, 1)},
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r, api
}

func noRequest(context.Context, string, string, string, any) error { return nil }

// Eight GPUs whose links flap each second must not flood the API server, and no change is lost.
func TestFlappingGPUsAreCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, api := newTestReporter(t, slog.New(slog.DiscardHandler))
		link := at(0, health.Unhealthy, "a link is down", health.None)
		const times = 1500 // less than an hour
		for range times {
			for _, h := range []health.Status{good, link} {
				r.Publish(stateOf(h, h, h, h, h, h, h, h))
				time.Sleep(time.Second)
			}
		}
		api.Lock()
		if most := burst + int(2*times*time.Second/defaultTiming.distance); api.requests > most {
			t.Errorf("%d requests, at most %d are allowed", api.requests, most)
		}
		api.Unlock()
		time.Sleep(10 * time.Minute)
		api.Lock()
		defer api.Unlock()
		total := 0
		for _, n := range api.counts {
			total += n
		}
		if want := 8 * (2*times - 1); total != want || len(api.counts) != 16 {
			t.Errorf("%d events in %d Events, want %d in 16", total, len(api.counts), want)
		}
	})
}

// While the API server is away, memory and the log do not grow.
func TestWhatWaitsIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logged := &log{}
		r, api := newTestReporter(t, slog.New(slog.NewTextHandler(logged, nil)))
		api.Lock()
		api.err = errors.New("connection refused")
		api.Unlock()
		for i := range 3 * maxRecords {
			r.events.add(event{warning, "GPUUnhealthy", fmt.Sprintf("fault %d", i)}, time.Now())
			time.Sleep(10 * time.Second)
		}
		r.events.mu.Lock()
		if n := len(r.events.records); n > maxRecords {
			t.Errorf("%d records", n)
		}
		r.events.mu.Unlock()
		api.Lock()
		// Its pauses grow to 20 s on average: in 128 minutes there are about 390 tries.
		if api.requests < 250 || api.requests > 600 {
			t.Errorf("%d requests in %v", api.requests, 3*maxRecords*10*time.Second)
		}
		api.err = nil
		api.Unlock()
		time.Sleep(2 * time.Hour)
		api.Lock()
		defer api.Unlock()
		if len(api.counts) != maxRecords {
			t.Errorf("%d Events arrived, want %d", len(api.counts), maxRecords)
		}
		text := logged.String()
		if strings.Count(text, "connection refused") != 1 || !strings.Contains(text, "Events are lost") ||
			!strings.Contains(text, "no longer the case: an Event cannot be reported") {
			t.Errorf("the log:\n%s", text)
		}
	})
}
