package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// Reasons of a GPU without a daemon that answers.
const (
	starting   = "its MPS control daemon is starting"
	notRunning = "its MPS control daemon is not running"
)

const (
	// startInterval is the time between checks of a daemon that has just been started, and retryInterval the time until
	// a step's result is checked.
	startInterval = 50 * time.Millisecond
	retryInterval = time.Second
	// patience is how many deadlines a daemon may be silent.
	patience = 3
)

// worker maintains the daemon of one GPU.
type worker struct {
	supervisor *Supervisor
	uuid, dir  string
	log        *slog.Logger
	wake       wake.Chan // the desired state has changed

	// Only run uses these.
	proc     *process  // the daemon, or nil
	driver   string    // the version of proc's driver
	answered bool      // proc has answered this plugin
	silent   time.Time // since when proc has not answered; zero if it has answered the last request
	ending   bool      // proc was told to end
	started  time.Time // the last attempt to start a daemon

	// Supervisor.mu guards these. Only run changes them.
	reason   string             // why containers cannot use the daemon, or empty
	ready    resource.MPSLimits // the daemon's limits, if the reason is empty
	occupied bool               // the GPU can be used through a daemon only
}

func newWorker(s *Supervisor, uuid string) *worker {
	dir := filepath.Join(s.opts.Dir, uuid)
	return &worker{
		supervisor: s, uuid: uuid, dir: dir, log: s.opts.Log.With("gpu", uuid),
		wake: wake.New(), reason: starting, occupied: prepared(dir),
	}
}

// run reconciles the daemon until ctx ends.
func (w *worker) run(ctx context.Context) {
	defer func() { w.proc.close() }()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-w.proc.done():
		case <-timer.C:
		}
		next, err := w.reconcile(ctx)
		// The end of the daemon is reported by itself.
		if err != nil && ctx.Err() == nil && (w.proc == nil || w.proc.runs()) {
			w.fail(err)
		}
		timer.Reset(next)
	}
}

// reconcile takes one step to the desired daemon. It returns the time until the next one, and why containers cannot use
// the daemon. A daemon with clients is never ended: what they compute would be lost.
func (w *worker) reconcile(ctx context.Context) (time.Duration, error) {
	w.noteEnd()
	desired := w.supervisor.desiredFor(w.uuid)
	interval := w.supervisor.opts.Interval
	if err := w.supervisor.acquire(); err != nil {
		if desired == nil && errors.Is(err, lock.ErrHeld) {
			return interval, nil // the daemon belongs to another instance
		}
		return interval, fmt.Errorf("its MPS control daemon cannot be managed: %w", err)
	}
	w.adopt()
	truncateLogs(w.dir)
	switch {
	case desired != nil && desired.Hold:
	case w.proc != nil:
		return w.maintain(ctx, desired)
	case desired != nil:
		return w.start(ctx, desired)
	case w.occupied || prepared(w.dir):
		return interval, w.release(ctx)
	}
	return interval, nil
}

// noteEnd handles the end of the daemon's process.
func (w *worker) noteEnd() {
	if w.proc == nil || w.proc.runs() {
		return
	}
	how := context.Cause(w.proc.ended).Error()
	if w.ending {
		how = "was stopped"
		w.started = time.Time{}
		w.log.Info(w.uuid + ": its MPS control daemon has ended as requested")
	} else {
		w.log.Warn(fmt.Sprintf("%s: its MPS control daemon %s; it is restarted if it is still configured; it printed %q",
			w.uuid, how, outputTail(w.dir)))
	}
	w.proc.close()
	w.proc = nil
	w.setReason("its MPS control daemon "+how, resource.MPSLimits{})
}

// adopt takes over a running daemon that an earlier plugin started. A plugin that was killed during a start can leave
// one that appears late, so this is tried whenever there is no daemon.
func (w *worker) adopt() {
	if w.proc != nil {
		return
	}
	r, err := readRecord(w.dir)
	if err != nil {
		return
	}
	p, err := openProcess(r.PID, r.matches)
	if err != nil {
		return // it has ended
	}
	w.take(p, r.Driver)
	w.log.Info(fmt.Sprintf("%s: the running MPS control daemon, process %d, was taken over", w.uuid, r.PID))
}

// take begins to supervise a daemon.
func (w *worker) take(p *process, driver string) {
	w.proc, w.driver, w.answered, w.silent, w.ending = p, driver, false, time.Now(), false
}

// start prepares the GPU and starts a daemon. One that ends soon is not started again before the next interval.
func (w *worker) start(ctx context.Context, desired *Daemon) (time.Duration, error) {
	interval := w.supervisor.opts.Interval
	if pause := interval - time.Since(w.started); pause > 0 {
		return pause, nil
	}
	w.started = time.Now()
	c, err := w.supervisor.control(w.dir)
	if err == nil {
		err = prepare(w.supervisor.opts.Dir, w.uuid, desired.Limits.SharedMemoryBytes)
	}
	if err == nil {
		err = w.setExclusive(ctx, true)
	}
	var p *process
	if err == nil {
		p, err = c.startDaemon()
	}
	if err != nil {
		return interval, fmt.Errorf("its MPS control daemon cannot be started: %w", err)
	}
	w.take(p, c.program.Driver)
	return startInterval, nil
}

// maintain gives a running daemon the desired limits. It ends one that is not desired, that belongs to another driver
// version than the installed one, or whose shm was unmounted, as soon as it has no clients.
func (w *worker) maintain(ctx context.Context, desired *Daemon) (time.Duration, error) {
	ctx, cancel := w.requestContext(ctx)
	defer cancel()
	c, err := w.supervisor.control(w.dir)
	busy, limited, hasShm := true, false, true
	if err == nil && desired != nil {
		limited, err = c.limited(ctx, desired.Limits)
		hasShm = err != nil || w.proc.hasShm(w.dir)
	}
	if err == nil && (desired == nil || c.program.Driver != w.driver || !hasShm) {
		busy, err = c.busy(ctx)
	}
	if err != nil {
		return w.handleSilence(err)
	}
	w.answered, w.silent, w.ending = true, time.Time{}, !busy
	switch {
	case !busy:
		if _, err := c.ask(ctx, "quit"); err != nil {
			return retryInterval, fmt.Errorf("its MPS control daemon does not end: %w", err)
		}
	case desired == nil:
		const text = "its MPS control daemon is no longer configured and ends when its last client has ended"
		if w.setReason(text, resource.MPSLimits{}) {
			w.log.Info(w.uuid+": "+text, "pid", w.proc.pid)
		}
	case !hasShm:
		return retryInterval, fmt.Errorf("its MPS control daemon has another /dev/shm than new containers would have, since "+
			"%s was unmounted: it is restarted when its last client has ended", filepath.Join(w.dir, shmName))
	case !limited || w.reason != "" || w.ready != desired.Limits:
		// They are set again unless this plugin set these very limits: the daemon's answer is rounded and proves less.
		return retryInterval, w.makeReady(ctx, c, desired.Limits)
	default:
		return w.supervisor.opts.Interval, nil
	}
	return retryInterval, nil
}

// requestContext is for all requests of one step. It ends at the deadline, however many answers a container delays, and
// when the daemon's process ends.
func (w *worker) requestContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, w.supervisor.opts.Deadline)
	stop := context.AfterFunc(w.proc.ended, cancel)
	return ctx, func() { stop(); cancel() }
}

// handleSilence waits for a daemon that does not answer because of err, and ends it after a while unless it has
// servers: these may have clients. The daemon has one deadline to end by itself.
func (w *worker) handleSilence(err error) (time.Duration, error) {
	if w.silent.IsZero() {
		w.silent = time.Now()
	}
	deadline := w.supervisor.opts.Deadline
	silence := time.Since(w.silent)
	exhausted := silence >= patience*deadline
	switch {
	case !exhausted && !w.answered:
		return startInterval, nil
	case !exhausted || w.proc.hasChildren():
		return retryInterval, fmt.Errorf("its MPS control daemon does not answer: %w", err)
	}
	w.ending = true
	w.fail(fmt.Errorf("its MPS control daemon does not answer and has no server, so it is ended: %w", err))
	signal := unix.SIGTERM
	if silence >= (patience+1)*deadline {
		signal = unix.SIGKILL
	}
	if err := w.proc.signal(signal); err != nil && !errors.Is(err, unix.ESRCH) {
		return retryInterval, fmt.Errorf("its MPS control daemon cannot be ended: %w", err)
	}
	return retryInterval, nil
}

// makeReady sets what containers rely on: the GPU is used through the daemon only, within the limits.
func (w *worker) makeReady(ctx context.Context, c *control, limits resource.MPSLimits) error {
	if err := w.setExclusive(ctx, true); err != nil {
		return fmt.Errorf("the compute mode of the GPU cannot be set, and processes could use it without MPS: %w", err)
	}
	err := c.limit(ctx, limits)
	if err == nil {
		err = mountShm(w.dir, limits.SharedMemoryBytes)
	}
	if err != nil {
		return fmt.Errorf("its MPS control daemon cannot be limited: %w", err)
	}
	if w.setReason("", limits) {
		text := ": its MPS control daemon is ready; each client may use " + describe(limits)
		w.log.Info(w.uuid+text, "pid", w.proc.pid)
	}
	return nil
}

// release makes the GPU usable without MPS. Its directories stay, since containers may still have them mounted.
func (w *worker) release(ctx context.Context) error {
	err := w.setExclusive(ctx, false)
	for _, name := range []string{outputName, recordName} {
		if err == nil {
			if err = os.Remove(filepath.Join(w.dir, name)); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	}
	if err == nil {
		err = unmountShm(w.dir) // last, since prepared means that there may be more to release
	}
	if err != nil {
		return fmt.Errorf("the GPU cannot be released for use without MPS: %w", err)
	}
	w.log.Info(w.uuid + ": the GPU is no longer shared by MPS")
	w.setReason(notRunning, resource.MPSLimits{})
	return nil
}

// setExclusive decides whether the GPU can be used through a daemon only.
func (w *worker) setExclusive(ctx context.Context, exclusive bool) error {
	if err := w.supervisor.opts.Modes.SetExclusive(ctx, w.uuid, exclusive); err != nil {
		return err
	}
	w.supervisor.mu.Lock()
	same := w.occupied == exclusive
	w.occupied = exclusive
	w.supervisor.mu.Unlock()
	if !same {
		w.supervisor.opts.Changed()
	}
	return nil
}

// setReason publishes why containers cannot use the daemon, or its limits, and reports whether that has changed.
func (w *worker) setReason(reason string, ready resource.MPSLimits) bool {
	w.supervisor.mu.Lock()
	same := w.reason == reason && w.ready == ready
	w.reason, w.ready = reason, ready
	w.supervisor.mu.Unlock()
	if !same {
		w.supervisor.opts.Changed()
	}
	return !same
}

// fail publishes a problem, and logs it when it begins.
func (w *worker) fail(err error) {
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	if w.setReason(text, resource.MPSLimits{}) {
		w.log.Warn(w.uuid + ": " + text)
	}
}
