package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// Reasons why containers do not get a device.
const (
	unchecked = "its MPS control daemon has not been checked yet"
	limiting  = "the limits of its MPS control daemon are being changed"
	occupied  = "its GPU is still shared by MPS until the last client has ended"
)

// ComputeModes sets the compute modes of GPUs.
type ComputeModes interface {
	// SetExclusive sets a GPU's compute mode to EXCLUSIVE_PROCESS, or to DEFAULT.
	SetExclusive(ctx context.Context, uuid string, exclusive bool) error
}

// MonitorOptions are the parameters of a Monitor. All except Interval, Retry and Deadline are required.
type MonitorOptions struct {
	// Dir has a directory for each GPU; see dirs.go.
	Dir string
	// Modes makes a GPU exclusive as long as it has a daemon, so that no process uses the GPU without MPS.
	Modes ComputeModes
	// Changed is called when the result of Reason may have changed.
	Changed func()
	// Interval is how often a daemon is checked; 0 means 10 seconds. The end of a daemon is noticed at once.
	Interval time.Duration
	// Retry is how often a daemon that is not ready is checked; 0 means one second.
	Retry time.Duration
	// Deadline bounds a check of a daemon as a whole; 0 means 5 seconds.
	Deadline time.Duration
	Log      *slog.Logger
}

// Monitor checks the daemons of the GPUs that MPS shares. Call Run once; the other methods may be called at any time.
type Monitor struct {
	opts MonitorOptions
	wake wake.Chan // woken when watchers may have to be started

	mu       sync.Mutex
	desired  map[string]resource.MPSLimits // by UUID
	watchers map[string]*watcher
}

// New returns a Monitor. It finds the GPUs that had a daemon before, and changes nothing.
func New(o MonitorOptions) *Monitor {
	o.Interval, o.Retry = cmp.Or(o.Interval, 10*time.Second), cmp.Or(o.Retry, time.Second)
	o.Deadline = cmp.Or(o.Deadline, 5*time.Second)
	m := &Monitor{opts: o, wake: wake.New(), watchers: map[string]*watcher{}}
	entries, _ := os.ReadDir(o.Dir) // without the directory, MPS was never used
	for _, e := range entries {
		if isUUID(e.Name()) {
			m.watchers[e.Name()] = newWatcher(m, e.Name(), occupied)
		}
	}
	return m
}

// Set replaces the resources whose daemons are checked.
func (m *Monitor) Set(resources []resource.Resource) {
	desired := map[string]resource.MPSLimits{}
	for i := range resources {
		for j := range resources[i].Devices {
			if d := &resources[i].Devices[j]; d.MPS != nil {
				desired[d.UUID] = *d.MPS
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.desired
	m.desired = desired
	for uuid := range desired {
		if m.watchers[uuid] == nil {
			m.watchers[uuid] = newWatcher(m, uuid, unchecked)
		}
	}
	for uuid, w := range m.watchers {
		if desired[uuid] != before[uuid] {
			w.next()
		}
	}
	m.wake.Wake()
}

// Reason returns why a device cannot be allocated because of MPS, or "". If MPS shares the GPU, its daemon must be
// ready and have the limits of the device. If MPS no longer shares the GPU, the GPU stays exclusive until its last MPS
// client has ended.
func (m *Monitor) Reason(d *resource.Device) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watchers[d.Parent]
	switch {
	case d.MPS == nil && (w == nil || w.released):
		return ""
	case d.MPS == nil:
		return cmp.Or(w.reason, occupied)
	case w == nil, w.released:
		return unchecked
	case w.reason == "" && w.ready != *d.MPS:
		return limiting
	}
	return w.reason
}

// Run checks the daemons, from the first call of Set until ctx ends.
func (m *Monitor) Run(ctx context.Context) error {
	var watchers sync.WaitGroup
	defer watchers.Wait()
	running := map[string]bool{}
	for {
		select {
		case <-m.wake:
		case <-ctx.Done():
			return nil
		}
		m.mu.Lock()
		for uuid, w := range m.watchers {
			if !running[uuid] {
				running[uuid] = true
				watchers.Go(func() { w.run(ctx) })
			}
		}
		m.mu.Unlock()
	}
}

// End ends the daemon of a GPU and the daemon's servers, and waits until they have ended. The process that runs the
// daemon then starts it again.
func (m *Monitor) End(ctx context.Context, uuid string) error {
	if _, err := os.Lstat(statusPath(m.opts.Dir, uuid)); errors.Is(err, fs.ErrNotExist) {
		return nil // without MPS, the path of the socket may be too long
	}
	conn, err := m.dial(ctx, uuid)
	if isAbsent(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end the MPS control daemon: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	_, err = exchange(conn, request{End: true}, 2*stopLimit+killDelay) // the only answer is the end of the daemon
	if ctx.Err() != nil {
		return fmt.Errorf("end the MPS control daemon: %w", context.Cause(ctx))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("end the MPS control daemon: %w", err)
	}
	return nil
}

// dial connects to the process that runs a GPU's daemon. A link in the place of its socket is not followed: the daemon
// could make one to the socket of another program.
func (m *Monitor) dial(ctx context.Context, uuid string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, m.opts.Deadline)
	defer cancel()
	return unixsocket.Dial(ctx, statusPath(m.opts.Dir, uuid))
}

// isAbsent reports whether an error of dial means that no process runs the daemon.
func isAbsent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

// watcher checks the daemon of one GPU.
type watcher struct {
	monitor *Monitor
	uuid    string

	// Guarded by Monitor.mu:
	next     context.CancelFunc // ends the wait for the next check
	reason   string             // why containers cannot use the daemon, or empty
	ready    resource.MPSLimits // the daemon's limits, if the reason is empty
	released bool               // the GPU can be used without a daemon
}

func newWatcher(m *Monitor, uuid, reason string) *watcher {
	return &watcher{monitor: m, uuid: uuid, reason: reason, next: func() {}}
}

func (w *watcher) run(ctx context.Context) {
	for ctx.Err() == nil {
		w.round(ctx)
	}
}

// round checks the daemon once, and waits until it must be checked again: after an interval, when the daemon ends, or
// when the desired limits change.
func (w *watcher) round(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m := w.monitor
	m.mu.Lock()
	desired, isDesired := m.desired[w.uuid]
	w.next = cancel
	m.mu.Unlock()
	if !isDesired {
		w.release(ctx)
		return
	}
	conn, err := m.dial(ctx, w.uuid)
	if err != nil {
		w.failAndWait(ctx, w.explain(err))
		return
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	a, err := exchange(conn, request{}, m.opts.Deadline)
	if err != nil {
		w.failAndWait(ctx, err)
		return
	}
	if err := w.use(ctx, a, desired); err != nil {
		w.failAndWait(ctx, err)
		return
	}
	_ = conn.SetDeadline(time.Now().Add(m.opts.Interval))
	if _, err = conn.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		w.fail(ctx, errors.New("its MPS control daemon has ended"))
	}
}

// explain turns an error of dial into a reason for people.
func (w *watcher) explain(err error) error {
	if isAbsent(err) {
		return fmt.Errorf("its MPS control daemon is not running: start gpu-cdi-mps@%s.service, or in Kubernetes the "+
			"DaemonSet gpu-cdi-mps, and see its log", w.uuid)
	}
	return fmt.Errorf("its MPS control daemon cannot be checked: %w", err)
}

// use lets containers use the GPU through its daemon, if the daemon has the desired limits.
func (w *watcher) use(ctx context.Context, a answer, desired resource.MPSLimits) error {
	switch {
	case a.Error != "":
		return errors.New(a.Error)
	case a.Limits != desired:
		return errors.New(limiting)
	}
	m := w.monitor
	m.mu.Lock()
	same := w.reason == "" && w.ready == desired
	m.mu.Unlock()
	if same {
		return nil
	}
	if err := m.opts.Modes.SetExclusive(ctx, w.uuid, true); err != nil {
		return fmt.Errorf("the GPU's compute mode cannot be set, so processes could use the GPU without MPS: %w", err)
	}
	m.opts.Log.Info(w.uuid + ": its MPS control daemon is ready; each client may use " + describe(desired))
	w.set(func() { w.reason, w.ready, w.released = "", desired, false })
	return nil
}

// release lets containers use a GPU without MPS, when MPS no longer shares it and its daemon has ended.
func (w *watcher) release(ctx context.Context) {
	m := w.monitor
	m.mu.Lock()
	released := w.released
	m.mu.Unlock()
	if released {
		<-ctx.Done()
		return
	}
	switch err := w.askToEnd(ctx); {
	case err == nil:
		w.failAndWait(ctx, errors.New(occupied))
		return
	case !isAbsent(err):
		w.failAndWait(ctx, err)
		return
	}
	if err := m.opts.Modes.SetExclusive(ctx, w.uuid, false); err != nil {
		w.failAndWait(ctx, fmt.Errorf("the GPU cannot be released for use without MPS: %w", err))
		return
	}
	m.opts.Log.Info(w.uuid + ": the GPU is no longer shared by MPS")
	w.set(func() { w.reason, w.ready, w.released = unchecked, resource.MPSLimits{}, true })
}

// askToEnd makes the process that runs the daemon read the descriptor again. It says that MPS no longer shares the
// GPU.
func (w *watcher) askToEnd(ctx context.Context) error {
	conn, err := w.monitor.dial(ctx, w.uuid)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = exchange(conn, request{}, w.monitor.opts.Deadline)
	return err
}

// failAndWait publishes a problem and waits until the next attempt.
func (w *watcher) failAndWait(ctx context.Context, err error) {
	w.fail(ctx, err)
	sleep(ctx, w.monitor.opts.Retry)
}

// fail publishes a problem, and logs it if it is new. Errors after the end of ctx are ignored.
func (w *watcher) fail(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	if w.set(func() { w.reason, w.ready, w.released = text, resource.MPSLimits{}, false }) {
		w.monitor.opts.Log.Warn(w.uuid + ": " + text)
	}
}

// set runs the function `change`, which may affect Reason, and reports whether the result of Reason has changed.
func (w *watcher) set(change func()) bool {
	w.monitor.mu.Lock()
	reason, ready, released := w.reason, w.ready, w.released
	change()
	same := w.reason == reason && w.ready == ready && w.released == released
	w.monitor.mu.Unlock()
	if !same {
		w.monitor.opts.Changed()
	}
	return !same
}
