package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// queue is a service of leases in memory, for the HTTP layer.
type queue struct {
	mu    sync.Mutex
	asks  []lease.Ask
	ended []string // "ID by UID", with a time if it was extended
	err   error
	wait  chan bool // Acquire waits until it is closed
	gone  chan error
	lines int // that Acquire sends before that
}

func (q *queue) Acquire(
	ctx context.Context, ask lease.Ask, waits func(lease.Waiting), grant func(lease.Granted) error,
) error {
	q.mu.Lock()
	q.asks = append(q.asks, ask)
	q.mu.Unlock()
	for i := range q.lines {
		waits(waitingOne(i + 1))
	}
	if q.wait != nil {
		select {
		case <-ctx.Done():
			q.gone <- context.Cause(ctx)
			return context.Cause(ctx)
		case <-q.wait:
		}
	}
	if q.err != nil {
		return q.err
	}
	return grant(lease.Granted{
		ID: "abc", Devices: []string{"d0"}, Indexes: []string{""},
		Options: model.RunOptions{Envs: map[string]string{"A": "<&>"}},
	})
}

func (q *queue) End(id string, by model.Caller) error {
	q.ended = append(q.ended, fmt.Sprint(id, " by ", by.UID))
	return q.err
}

func (q *queue) Extend(_ context.Context, id string, by model.Caller, left time.Duration) error {
	q.ended = append(q.ended, fmt.Sprint(id, " by ", by.UID, " in ", left))
	return q.err
}

func (q *queue) List() ([]lease.Lease, []lease.Waiting, []lease.Busy) {
	ends := admitted.Add(time.Hour)
	leases := []lease.Lease{
		{
			ID: "abc", UID: 1, User: "ada", PID: 2, Command: "x", Resource: "example.com/dev", Devices: []string{"d0"},
			Since: admitted,
		},
		{
			ID: "def", User: "root", Resource: "example.com/dev", Devices: []string{"d1"}, Indexes: []string{"1"},
			Models: []string{"M"}, Since: admitted, Ends: &ends,
		},
	}
	return leases, []lease.Waiting{waitingOne(1)}, []lease.Busy{
		{Resource: "example.com/dev", Device: "d2", Reason: "process 7 uses it", At: admitted},
	}
}

func waitingOne(position int) lease.Waiting {
	return lease.Waiting{
		Request: "2 devices", UID: 1, User: "ada", PID: 2, Command: "x", Since: admitted, Position: position,
		Reason: "0 of 2",
	}
}

// serveLeases serves the API, or only leases.
func serveLeases(t *testing.T, q *queue, only bool) *Client {
	t.Helper()
	return serve(t, &placements{}, func(s *Server) {
		s.Leases, s.LeasesOnly = q, only
		if only {
			s.ParsePod, s.NodeStatus, s.Metrics = nil, nil, nil
		}
	})
}

func TestALeaseFromTheQueueToItsEnd(t *testing.T) {
	for name, only := range map[string]bool{"the API": false, "the socket of leases": true} {
		t.Run(name, func(t *testing.T) {
			q := &queue{lines: 3}
			c := serveLeases(t, q, only)
			var waited []int
			request := LeaseRequest{
				Request: lease.Request{
					Count: 2, Resource: "r", Model: "M", Profile: "p", MinMemory: 1 << 40, SameNUMA: true, AllowBusy: true,
				},
				Command: "python3 <x> & y", Seconds: 1.5, PID: 7, Timed: true, Confine: true,
			}
			g, err := c.Lease(t.Context(), request, func(w lease.Waiting) { waited = append(waited, w.Position) })
			testenv.Must(t, err)
			if g.ID != "abc" || g.Options.Envs["A"] != "<&>" || !slices.Equal(waited, []int{1, 2, 3}) {
				t.Errorf("granted %+v, waited at %v", g, waited)
			}
			want := lease.Ask{
				Request: request.Request, Command: request.Command, For: 1500 * time.Millisecond,
				PID: 7, Timed: true, Confine: true,
				By: model.Caller{UID: os.Geteuid(), GID: os.Getegid(), PID: os.Getpid()},
			}
			if diff := cmp.Diff([]lease.Ask{want}, q.asks, cmpopts.IgnoreUnexported(lease.Request{})); diff != "" {
				t.Errorf("asked (-want +got):\n%s", diff)
			}
			list, err := c.Leases(t.Context())
			if err != nil || len(list.Items) != 2 || len(list.Waiting) != 1 || list.Items[1].Ends == nil {
				t.Errorf("the list: %+v, %v", list, err)
			}
			if len(list.Busy) != 1 || list.Busy[0].Reason != "process 7 uses it" {
				t.Errorf("busy devices: %+v", list.Busy)
			}
			testenv.Must(t, c.ExtendLease(t.Context(), "abc", time.Minute), c.EndLease(t.Context(), "abc"))
		})
	}
}

// Whoever may use the whole API ends leases as root does, and others as themselves.
func TestAsWhomALeaseIsEnded(t *testing.T) {
	for only, want := range map[bool]string{false: "abc by 0", true: fmt.Sprint("abc by ", os.Geteuid())} {
		q := &queue{}
		c := serveLeases(t, q, only)
		testenv.Must(t, c.EndLease(t.Context(), "abc"), c.ExtendLease(t.Context(), "abc", 90*time.Second))
		if !slices.Equal(q.ended, []string{want, want + " in 1m30s"}) {
			t.Errorf("leases only: %t: %v, want %q", only, q.ended, want)
		}
	}
}

// The socket of leases answers nothing else, in particular nothing that admits, starts or frees.
func TestTheSocketOfLeasesHasNothingElse(t *testing.T) {
	c := serveLeases(t, &queue{}, true)
	denied := []route{{method: http.MethodGet, path: "/v1/watch"}}
	for _, r := range routes {
		if !strings.HasPrefix(r.path, leasesPath) {
			denied = append(denied, r)
		}
	}
	for _, r := range denied {
		for _, path := range []string{r.path, "/v1/leases/.." + strings.TrimPrefix(r.path, "/v1"), "/" + r.path} {
			err := c.do(t.Context(), r.method, strings.NewReplacer("{uid}", "u1", "{container}", "c").Replace(path), nil, nil)
			if failed, ok := errors.AsType[*Error](err); !ok || failed.Code != http.StatusNotFound {
				t.Errorf("%s %s: %v", r.method, path, err)
			}
		}
	}
	for _, method := range []string{http.MethodPut, http.MethodPatch, http.MethodDelete} {
		err := c.do(t.Context(), method, leasesPath, nil, nil)
		if failed, ok := errors.AsType[*Error](err); !ok || failed.Code != http.StatusMethodNotAllowed {
			t.Errorf("%s: %v", method, err)
		}
	}
}

func TestLeaseErrors(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		code   int
		reason string
	}{
		"a request that makes no sense": {lease.ErrInvalid, 400, "BadRequest"},
		"more than the host has":        {fmt.Errorf("%w 9\ndevices", lease.ErrImpossible), 422, "Impossible"},
		"too many wait":                 {lease.ErrTooMany, 429, "TooManyRequests"},
		"no lease":                      {lease.ErrNotFound, 404, "NotFound"},
		"another user's lease":          {lease.ErrNotYours, 403, "Forbidden"},
		"a full disk":                   {manager.ErrRetry, 503, "ServiceUnavailable"},
		"a long text": {
			fmt.Errorf("%w %s", lease.ErrInvalid, strings.Repeat("x", 1<<20)), 400, "BadRequest",
		},
		"another error": {errors.New("something"), 500, "InternalError"},
	} {
		t.Run(name, func(t *testing.T) {
			client := serveLeases(t, &queue{err: c.err}, true)
			_, acquire := client.Lease(t.Context(), LeaseRequest{}, nil)
			for verb, err := range map[string]error{"acquire": acquire, "end": client.EndLease(t.Context(), "abc")} {
				failed, ok := errors.AsType[*Error](err)
				if !ok || failed.Code != c.code || failed.Reason != c.reason || strings.Contains(failed.Text, "\n") ||
					len(failed.Text) > 2000 {
					t.Errorf("%s: %.300v, want %d %s", verb, err, c.code, c.reason)
				}
			}
		})
	}
}

func TestWrongRequestsForLeases(t *testing.T) {
	q := &queue{}
	c := serveLeases(t, q, true)
	for name, r := range map[string]struct {
		body string
		code int
		text string
	}{
		"nothing":                     {``, 400, "EOF"},
		"no JSON":                     {`count: 1`, 400, "invalid character"},
		"a list":                      {`[]`, 400, "cannot unmarshal array"},
		"two values":                  {`{"count": 1} {"count": 2}`, 400, "more than one value"},
		"an unknown field":            {`{"count": 1, "gpus": 1}`, 400, `unknown field "gpus"`},
		"a count that is a text":      {`{"count": "1"}`, 400, "cannot unmarshal string"},
		"a part of a device":          {`{"count": 0.5}`, 400, "cannot unmarshal number"},
		"less than no memory":         {`{"count": 1, "minMemoryBytes": -1}`, 400, "cannot unmarshal number -1"},
		"less than no time":           {`{"count": 1, "seconds": -1}`, 400, "seconds is -1, want 0 to"},
		"a time without an end":       {`{"count": 1, "seconds": 1e300}`, 400, "seconds is 1e+300"},
		"a process that is no number": {`{"count": 1, "pid": "1"}`, 400, "cannot unmarshal string"},
		"a request that is too long":  {`{"command": "` + strings.Repeat("x", maxBody) + `"}`, 413, "larger than 256 KiB"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.do(t.Context(), http.MethodPost, leasesPath, []byte(r.body), nil)
			failed, ok := errors.AsType[*Error](err)
			if !ok || failed.Code != r.code || !strings.Contains(failed.Text, r.text) {
				t.Errorf("%v, want %d with %q", err, r.code, r.text)
			}
		})
	}
	if len(q.asks) > 0 {
		t.Errorf("asked: %+v", q.asks)
	}
}

// A request ends with the connection, however the client has gone, also after the time for reading requests.
func TestTheClientOfALeaseDisconnects(t *testing.T) {
	q := &queue{wait: make(chan bool), gone: make(chan error, 1), lines: 1}
	c := serveLeases(t, q, true)
	t.Run("its context ends", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		enough := errors.New("enough")
		_, err := c.Lease(ctx, LeaseRequest{}, func(lease.Waiting) { cancel(enough) })
		if !errors.Is(err, enough) {
			t.Error(err)
		}
		if err := <-q.gone; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	t.Run("its connection is closed", func(t *testing.T) {
		conn := postLease(t, c.path)
		line, err := bufio.NewReader(conn).ReadString('}')
		testenv.Must(t, err)
		if !strings.HasPrefix(line, "HTTP/1.1 200 OK\r\n") {
			t.Errorf("the answer: %s", line)
		}
		testenv.Must(t, conn.Close())
		if err := <-q.gone; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// postLease sends a request for a lease, and does not read the answer.
func postLease(t *testing.T, path string) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", path)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, "POST /v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n{\"count\":1}")
	testenv.Must(t, err)
	return conn
}

// Where each user may ask, no user's requests are in the log, except where the manager is at fault.
func TestTheLogOfRequests(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		only bool
		err  error
		want slog.Level
	}{
		"the API":                                          {false, nil, slog.LevelInfo},
		"the API, a wrong request":                         {false, lease.ErrInvalid, slog.LevelWarn},
		"the socket of leases":                             {true, nil, slog.LevelDebug},
		"the socket of leases, a wrong request":            {true, lease.ErrInvalid, slog.LevelDebug},
		"the socket of leases, no such lease":              {true, lease.ErrNotFound, slog.LevelDebug},
		"the socket of leases, one that begins":            {true, manager.ErrRetry, slog.LevelDebug},
		"the socket of leases, what the manager cannot do": {true, errors.New("no space left"), slog.LevelWarn},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := &testenv.Log{}
			client := serve(t, &placements{}, func(s *Server) {
				s.Leases, s.LeasesOnly = &queue{err: c.err}, c.only
				s.Log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			})
			_ = client.EndLease(t.Context(), "abc")
			_, _ = client.Lease(t.Context(), LeaseRequest{Command: "x"}, func(lease.Waiting) {})
			lines := strings.Split(strings.TrimSpace(log.String()), "\n")
			want := 2 // what the service says of a lease that begins is not here
			if c.err == nil {
				want = 1
			}
			if len(lines) != want {
				t.Errorf("the log has %d lines, want %d:\n%s", len(lines), want, log)
			}
			for _, line := range lines {
				if !strings.Contains(line, "level="+c.want.String()+" ") {
					t.Errorf("want the level %v: %s", c.want, line)
				}
			}
		})
	}
}

// Clients that never send all of their requests take no places from others.
func TestClientsThatSendSlowly(t *testing.T) {
	t.Parallel()
	c := serveLeases(t, &queue{}, true)
	for range maxChanges {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", c.path)
		testenv.Must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = io.WriteString(conn, "POST /v1/leases/abc/extend HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"+
			"Expect: 100-continue\r\n\r\n")
		testenv.Must(t, err)
		line, err := bufio.NewReader(conn).ReadString('\n')
		if line != "HTTP/1.1 100 Continue\r\n" { // the server waits for the body now
			t.Fatalf("%q, %v", line, err)
		}
	}
	testenv.Must(t, c.EndLease(t.Context(), "abc"))
}

// A client that does not read holds up its own request for a while, and no other.
func TestAClientThatDoesNotRead(t *testing.T) {
	t.Parallel()
	q := &queue{lines: 20_000}
	c := serveLeases(t, q, true)
	postLease(t, c.path)
	testenv.Eventually(t, "it has arrived", func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return len(q.asks) == 1
	})
	if _, err := c.Leases(t.Context()); err != nil {
		t.Error(err)
	}
}

// When the manager ends, those who wait are told.
func TestTheManagerEndsWhileARequestWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lease.sock")
	l, err := Listen(t.Context(), path, unixsocket.OwnerOnly, nil)
	testenv.Must(t, err)
	q := &queue{wait: make(chan bool), gone: make(chan error, 1), lines: 1}
	s := &Server{Manager: &placements{}, Log: slog.New(slog.DiscardHandler), Leases: q, LeasesOnly: true}
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	_, err = NewClient(path).Lease(t.Context(), LeaseRequest{}, func(lease.Waiting) { end() })
	if !errors.Is(err, manager.ErrRetry) || !strings.HasPrefix(err.Error(), "the device manager ends") {
		t.Error(err)
	}
	testenv.Must(t, <-done)
}

// What the document has of a request is what the server reads.
func TestTheDocumentsLeaseRequest(t *testing.T) {
	d := openDocument(t)
	schema, err := d.compiler.Compile("api.json#/components/schemas/LeaseRequest")
	testenv.Must(t, err)
	full := LeaseRequest{
		Request: lease.Request{
			Count: 1, Resource: "r", Model: "m", Profile: "p", MinMemory: 1, SameNUMA: true, AllowBusy: true,
		},
		Command: "c", Seconds: 0.5, PID: 1, Timed: true, Confine: true,
	}
	data, err := json.Marshal(full)
	testenv.Must(t, err)
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(data)))
	testenv.Must(t, err)
	if err := schema.Validate(doc); err != nil {
		t.Error(err)
	}
	if got, want := len(doc.(map[string]any)), len(schema.Properties); got != want {
		t.Errorf("a request has %d fields, and the document %d", got, want)
	}
}

// The process of a lease may use its devices, so nobody takes them from the pod or prepares them again.
func TestTheRequestsForPodsLeaveLeasesAlone(t *testing.T) {
	placed := &placements{pods: []model.Placement{{
		Pod:   model.Pod{UID: "lease-abc", Name: "abc", Containers: []model.Container{{Name: "main"}}},
		Lease: &model.Lease{},
	}}}
	c := serve(t, placed, func(s *Server) { s.Leases = &queue{} })
	_, start := c.Start(t.Context(), "lease-abc", "main")
	for verb, err := range map[string]error{
		"start": start, "ended": c.Ended(t.Context(), "lease-abc", "main"), "release": c.Release(t.Context(), "lease-abc"),
	} {
		if failed, ok := errors.AsType[*Error](err); !ok || failed.Code != http.StatusConflict ||
			!strings.Contains(failed.Hint, "lease end abc") {
			t.Errorf("%s: %v", verb, err)
		}
	}
	if len(placed.pods) != 1 || placed.pods[0].Ended != nil {
		t.Errorf("placed are %+v", placed.pods)
	}
}
