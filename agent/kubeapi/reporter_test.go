package kubeapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/test/lib/apiservertest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// log is what is logged; it can be read while that goes on.
type log struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// quick makes what takes seconds or minutes take milliseconds.
var quick = timing{
	request:    10 * time.Second,
	firstPause: 5 * time.Millisecond, longestPause: 20 * time.Millisecond,
	heartbeat: time.Hour, between: time.Millisecond,
	distance: time.Millisecond,
	last:     5 * time.Second,
}

// reporting returns a Reporter that runs until the test ends, and what it logs.
func reporting(t *testing.T, api *apiservertest.Server, timing timing) (*Reporter, *log) {
	t.Helper()
	l := &log{}
	r := New(Options{
		Events: true, Condition: true, Credentials: api.Dir, Env: api.Env(),
		Log: slog.New(slog.NewTextHandler(l, nil)), timing: timing,
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Error("Run goes on after its end")
		}
	})
	return r, l
}

var waitFor = testenv.Eventually

func awaitStatus(t *testing.T, api *apiservertest.Server, status string) *apiservertest.Condition {
	t.Helper()
	var c *apiservertest.Condition
	waitFor(t, "the condition "+status, func() bool {
		c = api.Condition(ConditionType)
		return c != nil && c.Status == status
	})
	return c
}

func awaitEvents(t *testing.T, api *apiservertest.Server, n int) []apiservertest.Event {
	t.Helper()
	var list []apiservertest.Event
	waitFor(t, "so many Events", func() bool {
		list = api.Events()
		return len(list) == n
	})
	return list
}

var bad = at(20, health.Unhealthy, "XID 95 (uncontained ECC error)", health.Reset)

const badText = "GPU 1 is unhealthy: XID 95 (uncontained ECC error); it needs a reset"

func TestTheAPIServerGetsEventsAndTheCondition(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	r, _ := reporting(t, api, quick)
	r.Publish(stateOf(good, good))
	c := awaitStatus(t, api, "True")
	if !c.LastTransitionTime.Equal(start) || time.Since(c.LastHeartbeatTime) > time.Minute {
		t.Errorf("the condition's times: %+v", c)
	}
	if ready := api.Condition("Ready"); ready == nil || ready.Reason != "KubeletReady" {
		t.Errorf("the kubelet's condition is %+v", ready)
	}

	// The kubelet has replaced the token.
	api.Rotate("second")
	r.Publish(stateOf(good, bad))
	if c = awaitStatus(t, api, "False"); c.Reason != "ResetNeeded" || c.Message != badText {
		t.Errorf("the condition: %+v", c)
	}
	if time.Since(c.LastTransitionTime) > time.Minute {
		t.Errorf("the last transition was at %v", c.LastTransitionTime)
	}
	e := awaitEvents(t, api, 1)[0]
	if e.Type != "Warning" || e.Reason != "GPUUnhealthy" || e.Message != badText || e.Count != 1 || e.Kind != "Event" {
		t.Errorf("the Event: %+v", e)
	}
	if o := e.InvolvedObject; o.Kind != "Node" || o.Name != apiservertest.Node || o.UID != apiservertest.Node {
		t.Errorf("the Event is about %+v", o)
	}
	if e.Source.Component != "gpu-cdi-plugin" || e.Source.Host != apiservertest.Node || e.FirstTimestamp.IsZero() {
		t.Errorf("the Event: %+v", e)
	}

	r.WasReset("GPU 1")
	r.Publish(stateOf(good, good))
	r.Publish(stateOf(good, bad))
	list := awaitEvents(t, api, 3)
	waitFor(t, "the count of the repeated Event", func() bool {
		list = api.Events()
		return list[0].Count == 2
	})
	if list[1].Message != "GPU 1 was reset" || list[2].Message != "GPU 1 is healthy again" || list[2].Type != "Normal" {
		t.Errorf("the Events: %+v", list)
	}

	// The API server forgets Events after an hour.
	api.Forget()
	r.Publish(stateOf(good, good))
	if e := awaitEvents(t, api, 1)[0]; e.Message != "GPU 1 is healthy again" || e.Count != 2 {
		t.Errorf("the Event: %+v", e)
	}
}

// A bad API server keeps nothing from going on, is not asked in a loop, and gets the last state when it works again.
// What has changed right before the end is reported although the next report is not due yet.
func TestTheLastStateIsReportedAtTheEnd(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	slow := quick
	slow.between, slow.distance = time.Hour, time.Hour
	r := New(Options{
		Events: true, Condition: true, Credentials: api.Dir, Env: api.Env(), Log: slog.New(slog.DiscardHandler), timing: slow,
	})
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	r.Publish(stateOf(good, bad))
	awaitStatus(t, api, "False")
	r.Publish(stateOf(good, good))
	end()
	testenv.Must(t, <-done)
	if c := api.Condition(ConditionType); c.Status != "True" {
		t.Errorf("after the end the condition is %+v", c)
	}
	if list := api.Events(); len(list) != 1 || list[0].Message != "GPU 1 is healthy again" {
		t.Errorf("after the end the Events are %+v", list)
	}
}

func TestABadAPIServer(t *testing.T) {
	t.Parallel()
	fail := func(code int, message string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { apiservertest.Fail(w, code, message) }
	}
	forbidden := `nodes "gpu-node-1" is forbidden: User "u" cannot patch resource "nodes/status"`
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		logs   string
	}{
		"403": {fail(http.StatusForbidden, forbidden), "the API server answers 403: nodes"},
		"409": {fail(http.StatusConflict, "the object has been modified"), "answers 409: the object has been modified"},
		"500": {fail(http.StatusInternalServerError, "etcd"), "the API server answers 500: etcd"},
		"not a Status": {
			func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) },
			"answers 502: 502 Bad Gateway",
		},
		"a huge answer": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			for range 1 << 10 {
				if _, err := w.Write(make([]byte, 1<<16)); err != nil {
					return
				}
			}
			t.Error("64 MiB of an answer were read")
		}, "answers 500: 500 Internal Server Error"},
		"huge headers": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 1<<20))
		}, "server response headers exceeded"},
		"an answer that is not HTTP": {func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = conn.Write([]byte(strings.Repeat("x", 3000) + "\r\n\r\n"))
		}, "malformed HTTP"},
		"it hangs": {nil, "context deadline exceeded"},
		"it closes the connection": {
			func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := apiservertest.New(t)
			if api.Hang(); c.answer != nil {
				api.Instead(c.answer)
			}
			timing := quick
			if c.answer == nil {
				timing.request = 3 * time.Second // enough for a request to a server that no longer hangs
			}
			r, l := reporting(t, api, timing)
			began := time.Now()
			r.Publish(stateOf(good, good))
			r.Publish(stateOf(good, bad))
			if took := time.Since(began); took >= timing.request {
				t.Errorf("publishing took %v", took)
			}
			waitFor(t, "several tries", func() bool { return api.Requests() >= 4 })
			waitFor(t, "the warning "+c.logs, func() bool { return strings.Contains(l.String(), c.logs) })
			if strings.Contains(l.String(), "first") {
				t.Errorf("the token is in the log:\n%s", l)
			}
			api.Instead(nil)
			awaitStatus(t, api, "False")
			waitFor(t, "the end of the warning", func() bool {
				return strings.Contains(l.String(), "no longer the case: the node condition GPUsHealthy cannot be reported")
			})
			if strings.Contains(l.String(), strings.Repeat("x", 2000)) {
				t.Error("a whole answer is in the log")
			}
			if n := strings.Count(l.String(), "level=WARN"); n > 4 {
				t.Errorf("%d warnings:\n%s", n, l)
			}
		})
	}
}

// Only a server with a certificate of the cluster's CA gets the token.
func TestTheTokenIsNotSentToOthers(t *testing.T) {
	t.Parallel()
	t.Run("wrong certificate", func(t *testing.T) {
		t.Parallel()
		api := apiservertest.New(t)
		api.NewCA()
		r, l := reporting(t, api, quick)
		r.Publish(stateOf(good))
		waitFor(t, "the warning", func() bool {
			return strings.Contains(l.String(), "certificate signed by unknown authority")
		})
		if n := api.Requests(); n > 0 {
			t.Errorf("the server got %d requests", n)
		}
	})
	t.Run("redirection", func(t *testing.T) {
		t.Parallel()
		others := make(chan string, 100)
		other := httptest.NewServer(
			http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) { others <- q.URL.Path }),
		)
		t.Cleanup(other.Close)
		api := apiservertest.New(t)
		api.Instead(func(w http.ResponseWriter, q *http.Request) {
			http.Redirect(w, q, other.URL, http.StatusTemporaryRedirect)
		})
		r, l := reporting(t, api, quick)
		r.Publish(stateOf(good))
		waitFor(t, "the warning", func() bool { return strings.Contains(l.String(), "the API server answers 307") })
		if len(others) > 0 {
			t.Error("the redirection was followed to " + <-others)
		}
	})
}

// An Event that the API server refuses does not keep the others back.
func TestARefusedEventIsGivenUp(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	var once sync.Once
	refused := make(chan struct{})
	api.Instead(func(w http.ResponseWriter, q *http.Request) {
		code := http.StatusServiceUnavailable
		if q.Method == http.MethodPost {
			code = http.StatusUnprocessableEntity
			once.Do(func() { close(refused) })
		}
		apiservertest.Fail(w, code, "reason: too strange")
	})
	r, l := reporting(t, api, quick)
	r.WasReset("GPU 0")
	<-refused
	api.Instead(nil)
	r.WasReset("GPU 1")
	if e := awaitEvents(t, api, 1)[0]; e.Message != "GPU 1 was reset" {
		t.Errorf("the Event: %+v", e)
	}
	if !strings.Contains(l.String(), "an Event is not reported to the API server") {
		t.Errorf("the log:\n%s", l)
	}
}

// An Event whose creation was not answered is not created twice.
func TestAnEventIsCreatedOnce(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	r, _ := reporting(t, api, quick)
	for range 2 { // the second creation finds the first
		one := record{event: event{normal, "GPUReset", "GPU 0 was reset"}, name: "once", count: 1}
		if err := r.events.sendOne(t.Context(), &one); err != nil || !one.created {
			t.Errorf("created: %t, %v", one.created, err)
		}
	}
	awaitEvents(t, api, 1)
}

func TestWithoutCredentialsThereIsOneWarning(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	empty := t.TempDir()
	noCA := t.TempDir()
	for _, dir := range []string{empty, noCA} {
		if err := os.WriteFile(filepath.Join(dir, "token"), []byte("token"), 0o600); err != nil && dir == noCA {
			t.Fatal(err)
		}
	}
	testenv.Must(t, os.Truncate(filepath.Join(empty, "token"), 0))
	for name, c := range map[string]struct {
		dir  string
		env  []string
		logs string
	}{
		"not in a cluster": {api.Dir, nil, "the environment variable KUBERNETES_SERVICE_HOST is not set"},
		"no node name":     {api.Dir, api.Env()[:2], "the environment variable NODE_NAME is not set"},
		"no token":         {t.TempDir(), api.Env(), "read the service account's token: open "},
		"an empty token":   {empty, api.Env(), "token is empty"},
		"no CA":            {noCA, api.Env(), "read the certificates of the API server's CA: open "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &log{}
			r := New(Options{
				Events: true, Condition: true, Credentials: c.dir, Env: c.env,
				Log: slog.New(slog.NewTextHandler(l, nil)),
			})
			r.Publish(stateOf(bad))
			r.WasReset("GPU 0")
			if err := r.Run(t.Context()); err != nil {
				t.Error(err)
			}
			if text := l.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, c.logs) {
				t.Errorf("the log:\n%s", text)
			}
		})
	}
}

func TestNothingIsReportedByDefault(t *testing.T) {
	t.Parallel()
	l := &log{}
	r := New(Options{Log: slog.New(slog.NewTextHandler(l, nil))})
	r.Publish(node.State{})
	r.WasReset("GPU 0")
	if err := r.Run(t.Context()); err != nil || l.String() != "" {
		t.Errorf("%v, and the log:\n%s", err, l)
	}
}

// The condition is sent at once when it changes, otherwise every five minutes, and never more often than every 5 s.
func TestTheConditionsHeartbeat(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, _ := newTestReporter(t, slog.New(slog.DiscardHandler))
		var mu sync.Mutex
		var sent []time.Duration
		began := time.Now()
		var err error
		r.conditions.do = func(context.Context, string, string, string, any) error {
			mu.Lock()
			defer mu.Unlock()
			sent = append(sent, time.Since(began))
			return err
		}
		expect := func(what string, want ...time.Duration) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if len(sent) != len(want) {
				t.Fatalf("%s: sent at %v, want %v", what, sent, want)
			}
			for i := range want {
				if sent[i] != want[i] {
					t.Errorf("%s: sent at %v, want %v", what, sent, want)
				}
			}
			sent, began = nil, time.Now()
		}
		time.Sleep(time.Hour)
		expect("before the first state")
		r.Publish(stateOf(good))
		expect("the first state", 0)
		time.Sleep(11 * time.Minute)
		expect("heartbeats", 5*time.Minute, 10*time.Minute)
		r.Publish(stateOf(bad))
		expect("a change", 0)
		for range 4 { // a state that comes and goes
			r.Publish(stateOf(good))
			time.Sleep(time.Second)
			r.Publish(stateOf(bad))
			time.Sleep(time.Second)
		}
		r.Publish(stateOf(good))
		time.Sleep(time.Minute)
		expect("a state that comes and goes", 5*time.Second, 10*time.Second)
		mu.Lock()
		err = errors.New("connection refused")
		mu.Unlock()
		r.Publish(stateOf(bad))
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		if len(sent) < 5 || len(sent) > 9 { // 1, 2, 4, 8, 16 and 32 s
			t.Errorf("after errors: sent at %v", sent)
		}
	})
}
