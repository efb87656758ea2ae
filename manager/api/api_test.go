package api

import (
	"bytes"
	"context"
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
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/pod"
	"gpu-cdi-plugin/manager/state"
	"gpu-cdi-plugin/test/lib/testenv"
)

// placements is a manager in memory with one device, for the HTTP layer.
type placements struct {
	mu       sync.Mutex
	pods     []model.Placement
	freed    []string
	withheld *state.Loss
	err      error // of every change
	events   chan manager.Event
	wait     chan struct{} // Admit waits until it is closed
	waiting  atomic.Int64
}

var admitted = time.Date(2026, 11, 22, 18, 0, 0, 0, time.UTC)

func (m *placements) Admit(ctx context.Context, p model.Pod, by model.Caller) (model.Placement, error) {
	if m.wait != nil {
		m.waiting.Add(1)
		select {
		case <-m.wait:
		case <-ctx.Done():
			return model.Placement{}, ctx.Err()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return model.Placement{}, m.err
	}
	placed := model.Placement{Pod: p, Admitted: admitted, Caller: by, Allocations: []model.Allocation{
		{Container: p.Containers[0].Name, Resource: "example.com/dev", IDs: []string{"d0"}},
	}}
	m.pods = append(m.pods, placed)
	return placed, nil
}

func (m *placements) Check() error { return m.err }

func (m *placements) find(uid, container string) (int, error) {
	for i, p := range m.pods {
		if p.Pod.UID == uid && (container == "" || p.Pod.Containers[0].Name == container) {
			return i, m.err
		}
	}
	return 0, fmt.Errorf("pod %q: %w", uid, manager.ErrNotFound)
}

func (m *placements) Start(_ context.Context, uid, container string) (model.RunOptions, error) {
	_, err := m.find(uid, container)
	return model.RunOptions{
		Envs:       map[string]string{"VISIBLE": "<0>"},
		Mounts:     []model.Mount{{ContainerPath: "/a", HostPath: "/b", ReadOnly: true}},
		Devices:    []model.DeviceNode{{ContainerPath: "/dev/x", HostPath: "/dev/y", Permissions: "rw"}},
		CDIDevices: []string{"example.com/dev=d0"}, Conflicts: []string{"two resources set A"},
	}, err
}

func (m *placements) Ended(_ context.Context, uid, container string) error {
	i, err := m.find(uid, container)
	if err == nil {
		m.pods[i].Ended = append(m.pods[i].Ended, container)
	}
	return err
}

func (m *placements) Release(_ context.Context, uid string) error {
	i, err := m.find(uid, "")
	if err == nil {
		m.pods = append(m.pods[:i], m.pods[i+1:]...)
	}
	return err
}

func (m *placements) Pods() []model.Placement { return m.pods }

func (m *placements) Pod(uid string) (model.Placement, bool) {
	i, err := m.find(uid, "")
	if err != nil {
		return model.Placement{}, false
	}
	return m.pods[i], true
}

func (m *placements) Resources() []manager.Resource {
	return []manager.Resource{
		{Name: "example.com/dev", Connected: true, Capacity: 1, Allocatable: 1, Devices: []manager.Device{
			{ID: "d0", Health: manager.Healthy, NUMA: []int{0}, Pod: "u1", Containers: []string{"c"}},
			{ID: "d1", Health: manager.Unknown, Withheld: true},
		}},
	}
}

// DeviceHealth is that of the only device.
func (m *placements) DeviceHealth(_ string, ids []string) []manager.Health {
	return slices.Repeat([]manager.Health{manager.Unhealthy}, len(ids))
}

func (m *placements) Withheld() *state.Loss { return m.withheld }

func (m *placements) Free(_ context.Context, resource string, ids []string) error {
	m.freed = append(m.freed, resource+"="+strings.Join(ids, ","))
	return m.err
}

func (m *placements) FreeAll(context.Context) error {
	m.freed = append(m.freed, "all")
	return m.err
}

func (m *placements) Watch(context.Context) <-chan manager.Event { return m.events }

// parse takes the manifest's text as the pod's name.
func parse(manifest []byte) (model.Pod, error) {
	name, ok := strings.CutPrefix(string(manifest), "pod: ")
	if !ok {
		return model.Pod{}, errors.New("the manifest has no pod")
	}
	return model.Pod{
		UID: "u1", Namespace: "default", Name: name,
		InitContainers: []model.Container{{Name: "side", Sidecar: true}},
		Containers:     []model.Container{{Name: "c", Limits: map[string]int{"example.com/dev": 1}}},
	}, nil
}

// serve serves the API until the test ends. The answers that its client gets are checked with the document.
func serve(t *testing.T, m *placements, change func(*Server)) *Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "api.sock")
	l, err := Listen(t.Context(), path, unixsocket.OwnerOnly, nil)
	testenv.Must(t, err)
	s := &Server{
		Manager: m, ParsePod: parse, Log: slog.New(slog.DiscardHandler),
		NodeStatus: func() NodeStatus {
			return NodeStatus{
				Capacity: map[string]string{"cpu": "2"}, Allocatable: map[string]string{"cpu": "1500m"},
			}
		},
	}
	s.Metrics = func() ([]byte, error) { return []byte("# HELP a b\na 1\n"), m.err }
	if change != nil {
		change(s)
	}
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	t.Cleanup(func() {
		end()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	c := NewClient(path)
	c.http.Transport = checked{openDocument(t), c.http.Transport}
	return c
}

func TestAPodFromAdmissionToRelease(t *testing.T) {
	m := &placements{}
	c := serve(t, m, nil)
	ctx := t.Context()
	got, err := c.Admit(ctx, []byte("pod: a"))
	testenv.Must(t, err)
	want := Pod{
		Metadata:       Metadata{Name: "a", Namespace: "default", UID: "u1", CreationTimestamp: admitted},
		InitContainers: []Container{{Name: "side", RestartPolicy: "Always"}},
		Containers: []Container{{
			Name: "c", Devices: []ContainerDevices{{ResourceName: "example.com/dev", DeviceIDs: []string{"d0"}}},
			AllocatedResourcesStatus: []ResourceStatus{
				{Name: "example.com/dev", Resources: []ResourceHealth{{ResourceID: "d0", Health: manager.Unhealthy}}},
			},
		}},
		Caller: model.Caller{UID: os.Geteuid(), GID: os.Getegid(), PID: os.Getpid()},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the placed pod (-want +got):\n%s", diff)
	}
	pods, err := c.Pods(ctx)
	if diff := cmp.Diff([]Pod{want}, pods); diff != "" || err != nil {
		t.Errorf("the list: %v\n%s", err, diff)
	}
	var alone Pod
	err = c.do(ctx, http.MethodGet, "/v1/pods/u1", nil, &alone)
	if diff := cmp.Diff(want, alone); diff != "" || err != nil {
		t.Errorf("the pod alone: %v\n%s", err, diff)
	}
	o, err := c.Start(ctx, "u1", "c")
	if err != nil || o.Envs["VISIBLE"] != "<0>" || len(o.Mounts)+len(o.Devices)+len(o.CDIDevices) != 3 {
		t.Errorf("the run options: %+v, %v", o, err)
	}
	if err := c.Ended(ctx, "u1", "c"); err != nil {
		t.Error(err)
	}
	pods, err = c.Pods(ctx)
	if err != nil || len(pods) != 1 || !pods[0].Containers[0].Ended || pods[0].InitContainers[0].Ended ||
		len(pods[0].Containers[0].Devices) != 1 || pods[0].Containers[0].AllocatedResourcesStatus != nil {
		t.Errorf("after the end of the container: %+v, %v", pods, err)
	}
	if err := c.Release(ctx, "u1"); err != nil {
		t.Error(err)
	}
	if pods, err := c.Pods(ctx); err != nil || pods == nil || len(pods) > 0 {
		t.Errorf("after the release: %v, %v", pods, err)
	}
}

func TestReads(t *testing.T) {
	m := &placements{withheld: &state.Loss{Time: admitted, Reason: "torn", File: "/x"}}
	c := serve(t, m, nil)
	list, err := c.Devices(t.Context())
	if diff := cmp.Diff(ResourceList{m.Resources(), m.withheld}, list); diff != "" || err != nil {
		t.Errorf("devices: %v\n%s", err, diff)
	}
	node, err := c.Node(t.Context())
	if err != nil || node.Allocatable["cpu"] != "1500m" || node.Capacity["cpu"] != "2" {
		t.Errorf("node: %+v, %v", node, err)
	}
}

func TestFree(t *testing.T) {
	m := &placements{}
	c := serve(t, m, nil)
	for name, r := range map[string]FreeRequest{
		"nothing":                    {},
		"a resource without devices": {ResourceName: "example.com/dev"},
		"devices without a resource": {DeviceIDs: []string{"d0"}},
		"all and some":               {All: true, ResourceName: "example.com/dev", DeviceIDs: []string{"d0"}},
	} {
		if err := c.Free(t.Context(), r); !errors.Is(err, manager.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, body := range []string{`{"all": true}x`, `{"all": true}{}`, `{"all": true, "other": 1}`, `{`, ``} {
		r, err := c.http.Post("http://manager/v1/devices/free", "application/json", strings.NewReader(body))
		testenv.Must(t, err)
		_ = r.Body.Close()
		if r.StatusCode != http.StatusBadRequest {
			t.Errorf("%q: status %d", body, r.StatusCode)
		}
	}
	for _, r := range []FreeRequest{{All: true}, {ResourceName: "example.com/dev", DeviceIDs: []string{"d0", "d1"}}} {
		if err := c.Free(t.Context(), r); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff([]string{"all", "example.com/dev=d0,d1"}, m.freed); diff != "" {
		t.Error(diff)
	}
}

// The client finds the manager's errors again, with the kubelet's reason and text.
func TestErrors(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		code   int
		reason string
		text   string
		is     error
	}{
		"not found": {
			fmt.Errorf("pod x: %w", manager.ErrNotFound), 404, "NotFound", "pod x: not found", manager.ErrNotFound,
		},
		"conflict":       {manager.ErrConflict, 409, "Conflict", "conflict", manager.ErrConflict},
		"an invalid pod": {manager.ErrInvalid, 400, "BadRequest", "invalid pod", manager.ErrInvalid},
		"later":          {manager.ErrRetry, 503, "ServiceUnavailable", "try again", manager.ErrRetry},
		"a bad response": {
			manager.ErrBadResponse, 502, "InternalError", manager.ErrBadResponse.Error(), manager.ErrBadResponse,
		},
		"another":     {errors.New("the disk is gone"), 500, "InternalError", "the disk is gone", nil},
		"out of time": {context.DeadlineExceeded, 504, "Timeout", "context deadline exceeded", nil},
		"no such devices": {
			&manager.RejectedError{Reason: manager.ReasonUnexpected, Message: "Allocate failed"},
			422, "UnexpectedAdmissionError", "Allocate failed", nil,
		},
		"not aligned": {
			&manager.RejectedError{Reason: manager.ReasonTopology, Message: "no"},
			422, "TopologyAffinityError", "no", nil,
		},
		"rejected, but later": {
			&manager.RejectedError{Reason: manager.ReasonUnexpected, Message: "no plugin", Err: manager.ErrRetry},
			503, "UnexpectedAdmissionError", "no plugin", manager.ErrRetry,
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := serve(t, &placements{err: c.err}, nil).Admit(t.Context(), []byte("pod: a"))
			got, ok := errors.AsType[*Error](err)
			if !ok || got.Code != c.code || got.Reason != c.reason || got.Text != c.text {
				t.Fatalf("got %#v", err)
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v is not %v", err, c.is)
			}
		})
	}
}

func TestMetrics(t *testing.T) {
	read := func(m *placements, change func(*Server)) (code int, kind, text string) {
		answer, err := serve(t, m, change).send(t.Context(), http.MethodGet, "/metrics", nil)
		testenv.Must(t, err)
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		testenv.Must(t, err)
		return answer.StatusCode, answer.Header.Get("Content-Type"), string(body)
	}
	code, kind, text := read(&placements{}, nil)
	if code != http.StatusOK || kind != "text/plain; version=0.0.4; charset=utf-8" || text != "# HELP a b\na 1\n" {
		t.Errorf("%d, %s, %q", code, kind, text)
	}
	code, kind, text = read(&placements{err: errors.New("broken")}, nil)
	if code != http.StatusInternalServerError || kind != "application/json" ||
		!strings.Contains(text, `"error":"collect the metrics: broken"`) {
		t.Errorf("%d, %s, %q", code, kind, text)
	}
	code, kind, text = read(&placements{}, func(s *Server) { s.Metrics = nil })
	if code != http.StatusNotFound || kind != "application/json" {
		t.Errorf("of a server without metrics: %d, %s, %q", code, kind, text)
	}
}

func TestHealthz(t *testing.T) {
	ask := func(m *placements) error {
		return serve(t, m, nil).do(t.Context(), http.MethodGet, "/v1/healthz", nil, nil)
	}
	if err := ask(&placements{}); err != nil {
		t.Error(err)
	}
	dead := errors.New("no device plugins can register")
	err := ask(&placements{err: dead})
	if got, ok := errors.AsType[*Error](err); !ok || got.Code != 503 || got.Text != dead.Error() {
		t.Errorf("while plugins cannot register: %#v", err)
	}
}

func TestWrongRequests(t *testing.T) {
	c := serve(t, &placements{}, nil)
	for _, r := range []struct {
		method, path, body string
		status             int
		allow, reason      string
	}{
		{"GET", "/", "", 404, "", "NotFound"},
		{"GET", "/v2/pods", "", 404, "", "NotFound"},
		{"GET", "/v1//pods", "", 404, "", "NotFound"},
		{"GET", "//v1/pods", "", 404, "", "NotFound"},
		{"GET", "/v1/./pods", "", 404, "", "NotFound"},
		{"GET", "/v1/x/../pods", "", 404, "", "NotFound"},
		{"GET", "/v1/pods/", "", 404, "", "NotFound"},
		{"GET", "/v1/pods/..", "", 404, "", "NotFound"},
		{"GET", "/v1/pods/a%2fb/c", "", 404, "", "NotFound"},
		{"POST", "/v1//pods", "pod: a", 404, "", "NotFound"},
		{"GET", "/v1/pods/u9", "", 404, "", "NotFound"},
		{"DELETE", "/v1/pods/u9", "", 404, "", "NotFound"},
		{"POST", "/v1/pods/u9/containers/c/start", "", 404, "", "NotFound"},
		{"DELETE", "/v1/pods", "", 405, "GET, POST", "MethodNotAllowed"},
		{"PUT", "/v1/pods/u9", "", 405, "DELETE, GET", "MethodNotAllowed"},
		{"GET", "/v1/pods/u9/containers/c/start", "", 405, "POST", "MethodNotAllowed"},
		{"POST", "/v1/watch", "", 405, "GET", "MethodNotAllowed"},
		{"OPTIONS", "/v1/node", "", 405, "GET", "MethodNotAllowed"},
		{"get", "/v1/node", "", 405, "GET", "MethodNotAllowed"},
		{"POST", "/v1/pods", "no pod", 400, "", "BadRequest"},
		{"POST", "/v1/devices/free", `{"al":true}`, 400, "", "BadRequest"},
		{"POST", "/v1/devices/free", `[`, 400, "", "BadRequest"},
	} {
		t.Run(r.method+" "+r.path, func(t *testing.T) {
			answer, err := c.send(t.Context(), r.method, r.path, []byte(r.body))
			testenv.Must(t, err)
			defer answer.Body.Close()
			if answer.StatusCode != r.status || answer.Header.Get("Allow") != r.allow {
				t.Errorf("%d, Allow: %q; want %d and %q", answer.StatusCode, answer.Header.Get("Allow"), r.status, r.allow)
			}
			if got, ok := errors.AsType[*Error](readError(answer)); !ok || got.Reason != r.reason {
				t.Errorf("the body: %#v, want the reason %s", got, r.reason)
			}
		})
	}
}

// HEAD has no body, and Go's client sends neither of the others.
func TestRequestsOfOtherClients(t *testing.T) {
	c := serve(t, &placements{}, nil)
	for request, want := range map[string]string{
		"HEAD /v1/watch HTTP/1.1":             "405 Method Not Allowed",
		"GET * HTTP/1.1":                      "404 Not Found",
		"CONNECT manager:80 HTTP/1.1":         "404 Not Found",
		"CONNECT /v1/pods HTTP/1.1":           "405 Method Not Allowed",
		"GET http://manager/v1/pods HTTP/1.1": "200 OK",
	} {
		t.Run(request, func(t *testing.T) {
			conn, err := net.Dial("unix", c.path)
			testenv.Must(t, err)
			defer conn.Close()
			if _, err := io.WriteString(conn, request+"\r\nHost: manager\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			answer, err := io.ReadAll(conn)
			if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 "+want+"\r\n") ||
				!strings.Contains(string(answer), "Content-Type: application/json\r\n") {
				t.Errorf("%v, %q, want %s with JSON", err, answer, want)
			}
		})
	}
}

// The largest manifest is read, and a larger body is refused with the limit.
func TestRequestsAreBounded(t *testing.T) {
	c := serve(t, &placements{}, nil)
	if _, err := c.Admit(t.Context(), []byte("pod: "+strings.Repeat("a", pod.MaxSize-len("pod: ")))); err != nil {
		t.Error("the largest manifest:", err)
	}
	large := bytes.Repeat([]byte{'a'}, pod.MaxSize+1)
	for path, text := range map[string]string{
		"/v1/pods":         "invalid pod manifest: it is larger than 256 KiB",
		"/v1/devices/free": "read the request: it is larger than 256 KiB",
	} {
		err := c.do(t.Context(), http.MethodPost, path, large, nil)
		if got, ok := errors.AsType[*Error](err); !ok || got.Code != http.StatusRequestEntityTooLarge || got.Text != text {
			t.Errorf("%s: %#v", path, err)
		}
	}
}

func TestWatch(t *testing.T) {
	m := &placements{events: make(chan manager.Event, 8)}
	c := serve(t, m, nil)
	placed := &model.Placement{
		Pod: model.Pod{UID: "u1", Name: "a", Containers: []model.Container{{Name: "c"}}}, Admitted: admitted,
		Allocations: []model.Allocation{{Container: "c", Resource: "example.com/dev", IDs: []string{"d0"}}},
	}
	sent := []manager.Event{
		{Type: manager.PodAdmitted, Placement: placed},
		{Type: manager.ResourceChanged, Resource: "example.com/dev", Count: manager.Count{Capacity: 2}},
		{Type: manager.HealthChanged, Devices: []manager.PodDevice{{ID: "d0", Pod: "u1", Health: manager.Unknown}}},
		{Type: manager.PodReleased, Placement: placed},
	}
	began := make(chan struct{})
	var got []string
	go func() {
		<-began
		for _, e := range sent {
			m.events <- e
		}
		close(m.events) // the client is too slow
	}()
	err := c.Watch(t.Context(), func() { close(began) }, func(e Event) error {
		text := string(e.Type)
		if e.Pod != nil {
			text += fmt.Sprintf(" %s %v", e.Pod.Metadata.UID, e.Pod.Containers[0].AllocatedResourcesStatus)
		}
		if e.Resource != nil {
			text += fmt.Sprint(" ", *e.Resource)
		}
		got = append(got, fmt.Sprint(text, len(e.Devices)))
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "list and watch again") {
		t.Errorf("the end of the watch: %v", err)
	}
	if diff := cmp.Diff([]string{
		"Admitted u1 [{example.com/dev [{d0 Unhealthy}]}]0", "Resource {example.com/dev 2 0}0", "Health1",
		"Released u1 []0", // another pod may have the device
	}, got); diff != "" {
		t.Error(diff)
	}
}

// A watch ends with its client, and its place is free again.
func TestWatchesAreBounded(t *testing.T) {
	c := serve(t, &placements{}, nil)
	ctx, end := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	began := make(chan struct{}, maxWatchers)
	for range maxWatchers {
		watching.Go(func() {
			if err := c.Watch(ctx, func() { began <- struct{}{} }, nil); !errors.Is(err, context.Canceled) {
				t.Errorf("the end of a watch: %v", err)
			}
		})
	}
	for range maxWatchers {
		<-began
	}
	err := c.Watch(t.Context(), func() { t.Error("one more watch") }, nil)
	if got, ok := errors.AsType[*Error](err); !ok || got.Code != http.StatusTooManyRequests {
		t.Errorf("one more watch: %v", err)
	}
	end()
	watching.Wait()
	testenv.Eventually(t, "a free place", func() bool {
		ctx, end := context.WithCancel(t.Context())
		defer end()
		return errors.Is(c.Watch(ctx, end, nil), context.Canceled)
	})
}

// While as many pods, leases and watches wait as can, lists are answered, and one more pod is refused at once.
func TestReadsWhileAllElseWaits(t *testing.T) {
	const maxWaiting = 384 // that of lease.Service
	m, q := &placements{wait: make(chan struct{})}, &queue{wait: make(chan bool), lines: 1}
	c := serve(t, m, func(s *Server) { s.Leases = q })
	var waiting, begun sync.WaitGroup
	begun.Add(maxWatchers + maxWaiting)
	watch, end := context.WithCancel(t.Context())
	for range maxWatchers {
		waiting.Go(func() {
			if err := c.Watch(watch, begun.Done, nil); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	for range maxWaiting {
		waiting.Go(func() {
			if _, err := c.Lease(t.Context(), LeaseRequest{}, func(lease.Waiting) { begun.Done() }); err != nil {
				t.Error(err)
			}
		})
	}
	begun.Wait()
	for range maxChanges {
		waiting.Go(func() {
			if _, err := c.Admit(t.Context(), []byte("pod: a")); err != nil {
				t.Error(err)
			}
		})
	}
	testenv.Eventually(t, "all to wait", func() bool { return m.waiting.Load() == maxChanges })
	err := c.Release(t.Context(), "none")
	if got, ok := errors.AsType[*Error](err); !ok || got.Code != http.StatusTooManyRequests {
		t.Errorf("one more: %v", err)
	}
	if _, err := c.Devices(t.Context()); err != nil {
		t.Error(err)
	}
	close(m.wait)
	close(q.wait)
	end()
	waiting.Wait()
}

func TestARequestThatTakesTooLongEnds(t *testing.T) {
	m := &placements{wait: make(chan struct{})}
	c := serve(t, m, func(s *Server) { s.maxWait = 10 * time.Millisecond })
	_, err := c.Admit(t.Context(), []byte("pod: a"))
	if got, ok := errors.AsType[*Error](err); !ok || got.Code != http.StatusGatewayTimeout {
		t.Errorf("%v", err)
	}
}

func TestOneManagerHasTheSocket(t *testing.T) {
	c := serve(t, &placements{}, nil)
	if _, err := Listen(t.Context(), c.path, unixsocket.OwnerOnly, nil); !errors.Is(err, ErrServed) {
		t.Errorf("a second one: %v", err)
	}
	other := NewClient(c.path + ".other")
	if _, err := other.Pods(t.Context()); !errors.Is(err, ErrNoManager) {
		t.Errorf("without a manager: %v", err)
	}
}

// What answers there need not be a manager.
func TestTheClientReadsAnyAnswer(t *testing.T) {
	for name, c := range map[string]struct{ answer, want string }{
		"none":           {"", "closed the connection"},
		"no JSON":        {"HTTP/1.1 200 OK\r\n\r\nhello", "read the answer"},
		"another error":  {"HTTP/1.1 500 no\r\n\r\n<html>", "the device manager answered 500 no"},
		"half an answer": {"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", path)
			testenv.Must(t, err)
			defer l.Close()
			go func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = conn.Read(make([]byte, 4096))
				_, _ = io.WriteString(conn, c.answer)
				_ = conn.Close()
			}()
			if _, err := NewClient(path).Pods(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}
