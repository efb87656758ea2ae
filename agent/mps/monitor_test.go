package mps

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// modes records which GPUs are exclusive.
type modes struct {
	mu        sync.Mutex
	exclusive map[string]bool
	err       error
}

func (m *modes) SetExclusive(_ context.Context, uuid string, exclusive bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.exclusive[uuid] = exclusive
	}
	return m.err
}

func (m *modes) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

func (m *modes) is(uuid string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exclusive[uuid]
}

// stub stands for the process that runs a daemon.
type stub struct {
	t        *testing.T
	listener *net.UnixListener
	mu       sync.Mutex
	answer   *answer // none is given if it is nil
	conns    []net.Conn
}

func startStub(t *testing.T, dir string, a *answer) *stub {
	t.Helper()
	testenv.Must(t, os.MkdirAll(filepath.Join(dir, testGPU, daemonName), 0o755))
	l, err := unixsocket.Listen(t.Context(), statusPath(dir, testGPU), unixsocket.OwnerOnly)
	testenv.Must(t, err)
	s := &stub{t: t, listener: l, answer: a}
	go s.run()
	t.Cleanup(s.end)
	return s
}

func (s *stub) run() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conns = append(s.conns, conn)
		if s.answer != nil {
			_ = json.NewEncoder(conn).Encode(s.answer)
		}
		s.mu.Unlock()
	}
}

// end closes the socket and all connections, like a process that ends.
func (s *stub) end() {
	_ = s.listener.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
}

// monitored is a monitor of one GPU.
type monitored struct {
	*Monitor
	t     *testing.T
	modes *modes
}

// newMonitored returns a monitor that runs. What is due in regular intervals is not, in the time of a test.
func newMonitored(t *testing.T, dir string, change func(*MonitorOptions)) *monitored {
	t.Helper()
	m := &monitored{t: t, modes: &modes{exclusive: map[string]bool{}}}
	o := MonitorOptions{
		Dir: dir, Modes: m.modes, Changed: func() {}, Interval: time.Hour, Retry: time.Millisecond, Log: testLog(t),
	}
	change(&o)
	m.Monitor = New(o)
	start(t, m.Run)
	return m
}

func unchanged(*MonitorOptions) {}

// share sets the limits that are desired of the GPU, or none.
func (m *monitored) share(limits *resource.MPSLimits) {
	m.Set([]resource.Resource{{Devices: []resource.Device{{UUID: testGPU, Parent: testGPU, MPS: limits}}}})
}

// await waits until the reason for a device with the limits contains a text, or is empty.
func (m *monitored) await(limits *resource.MPSLimits, text string) {
	m.t.Helper()
	eventually(m.t, "the reason "+text, func() bool {
		reason := m.Reason(&resource.Device{UUID: testGPU, Parent: testGPU, MPS: limits})
		return (reason == "") == (text == "") && strings.Contains(reason, text)
	})
}

func TestADeviceIsHealthyWhileItsDaemonIsReady(t *testing.T) {
	t.Parallel()
	dir := makeShortDir(t)
	m := newMonitored(t, dir, unchanged)
	m.share(&half)
	m.await(&half, "start gpu-cdi-mps@"+testGPU+".service")
	s := startStub(t, dir, &answer{Limits: half})
	m.await(&half, "")
	if !m.modes.is(testGPU) {
		t.Error("the GPU is not exclusive")
	}
	m.await(&lessThanHalf, limiting)
	s.end()
	m.await(&half, "is not running") // though no check is due
	startStub(t, dir, &answer{Limits: half})
	m.await(&half, "")
}

func TestOtherLimitsAreAskedForAtOnce(t *testing.T) {
	t.Parallel()
	dir := makeShortDir(t)
	s := startStub(t, dir, &answer{Limits: half})
	m := newMonitored(t, dir, unchanged)
	m.share(&half)
	m.await(&half, "")
	s.mu.Lock()
	s.answer = &answer{Limits: lessThanHalf}
	s.mu.Unlock()
	m.share(&lessThanHalf)
	m.await(&lessThanHalf, "")
}

func TestADeviceIsUnhealthyWithTheReason(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer *answer
		modes  error
		want   string
	}{
		"a problem of the daemon":               {&answer{Error: "it is not well"}, nil, "it is not well"},
		"a daemon with other limits":            {&answer{Limits: lessThanHalf}, nil, limiting},
		"no answer":                             {nil, nil, "no answer within 50ms"},
		"a compute mode that cannot be changed": {&answer{Limits: half}, errors.New("not permitted"), "not permitted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := makeShortDir(t)
			startStub(t, dir, c.answer)
			m := newMonitored(t, dir, func(o *MonitorOptions) { o.Deadline = 50 * time.Millisecond })
			m.modes.fail(c.modes)
			m.share(&half)
			m.await(&half, c.want)
		})
	}
}

// The first serve may have made the GPU exclusive, and the second one does not share it.
func TestAGPUIsReleasedWhenItsDaemonHasEnded(t *testing.T) {
	t.Parallel()
	dir := makeShortDir(t)
	s := startStub(t, dir, &answer{Error: "it ends when its last client has ended"})
	m := newMonitored(t, dir, unchanged)
	m.modes.exclusive[testGPU] = true
	m.share(nil)
	m.await(nil, occupied)
	if !m.modes.is(testGPU) {
		t.Error("the GPU is not exclusive although its daemon runs")
	}
	s.end()
	m.await(nil, "")
	if m.modes.is(testGPU) {
		t.Error("the GPU is exclusive")
	}
	m.await(&half, unchecked) // until it is shared again
}
