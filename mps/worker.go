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

// starting is the reason of a GPU whose daemon has not answered yet.
const starting = "its MPS control daemon is starting"

const (
	// startInterval is the time between checks of a daemon that has just been started, and retryInterval the one after
	// a problem.
	startInterval = 50 * time.Millisecond
	retryInterval = time.Second
	// patience is how many deadlines a daemon may take until its first answer, and how many it may be silent later.
	patience = 3
)

// worker reconciles the daemon of one GPU.
type worker struct {
	supervisor *Supervisor
	uuid, dir  string
	log        *slog.Logger
	kick       wake.Chan // the desired state has changed

	// Only run uses these.
	proc         *process  // the daemon, or nil
	driver       string    // the version of proc's driver
	since        time.Time // start or adoption of proc
	quitting     bool      // proc should end
	answered     bool      // proc has answered since that time
	silent       time.Time // when the first request without an answer was sent; zero if the last one was answered
	exclusive    bool      // this process has set the GPU's compute mode
	given        resource.MPSLimits
	startAfter   time.Time
	restartPause time.Duration
	logged       string // the last problem that was logged

	// Supervisor.mu guards these.
	started  bool               // Run has started the worker
	ready    resource.MPSLimits // the daemon's limits
	reason   string             // why containers cannot use the daemon, or empty
	occupied bool               // the GPU can be used through a daemon only
}

func newWorker(s *Supervisor, uuid string) *worker {
	dir := filepath.Join(s.opts.Dir, uuid)
	return &worker{
		supervisor: s, uuid: uuid, dir: dir, log: s.opts.Log.With("gpu", uuid),
		kick: wake.New(), reason: starting, occupied: prepared(dir),
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
		case <-w.kick:
		case <-w.proc.done():
		case <-timer.C:
		}
		timer.Reset(w.reconcile(ctx))
	}
}

// reconcile observes the daemon and takes one action. It returns the time until the next reconciliation.
func (w *worker) reconcile(ctx context.Context) time.Duration {
	w.noteEnd()
	desired := w.supervisor.desiredFor(w.uuid)
	if err := w.supervisor.acquire(); err != nil {
		if desired != nil || !errors.Is(err, lock.ErrHeld) { // otherwise the daemon belongs to another instance
			w.fail("its MPS control daemon cannot be managed", err)
		}
		return w.supervisor.opts.Interval
	}
	w.adopt()
	s, err := w.observe(ctx, desired)
	if ctx.Err() != nil {
		return w.supervisor.opts.Interval
	}
	if s.runs && !w.proc.runs() { // it ended during the requests
		return 0
	}
	if s.answers && desired != nil && !desired.Hold && !w.exclusive { // it was adopted
		if err := w.makeExclusive(ctx); err != nil {
			w.fail("the compute mode of the GPU cannot be set, and processes could use it without MPS", err)
			return retryInterval
		}
	}
	w.publish(desired, s, err)
	switch decide(desired, s) {
	case start:
		return w.start(ctx, desired)
	case limit:
		return w.limit(ctx, desired)
	case quit:
		return w.quit(ctx)
	case kill:
		return w.kill(ctx)
	case release:
		return w.release(ctx)
	case none:
	}
	return w.interval(desired, s)
}

// interval returns the time until the next reconciliation if there was nothing to do.
func (w *worker) interval(desired *Daemon, s state) time.Duration {
	switch {
	case desired != nil && !desired.Hold && !s.runs:
		return max(time.Until(w.startAfter), startInterval)
	case desired == nil && s.busy:
		w.infoOnce("its MPS control daemon is no longer configured and ends when its last client has ended")
		return retryInterval
	case s.runs && !s.answers && w.isStarting():
		return startInterval
	case s.runs && !s.answers:
		return retryInterval
	}
	return w.supervisor.opts.Interval
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
	w.proc, w.driver, w.since = p, r.Driver, time.Now()
	w.log.Info(fmt.Sprintf("%s: the running MPS control daemon, process %d, was taken over", w.uuid, r.PID))
}

// noteEnd handles the end of the daemon's process.
func (w *worker) noteEnd() {
	if w.proc == nil || w.proc.runs() {
		return
	}
	how := context.Cause(w.proc.ended).Error()
	w.proc.close()
	ran := time.Since(w.since)
	w.proc, w.answered, w.silent, w.given = nil, false, time.Time{}, resource.MPSLimits{}
	if w.quitting {
		w.quitting, w.startAfter = false, time.Now()
		w.log.Info(w.uuid + ": its MPS control daemon has ended as requested")
		w.setReason("its MPS control daemon was stopped", resource.MPSLimits{})
		return
	}
	pause := w.nextPause(ran)
	w.log.Warn(fmt.Sprintf("%s: its MPS control daemon %s; it is restarted after %v if it is still configured; "+
		"it printed %q", w.uuid, how, pause, outputTail(w.dir)))
	w.setReason("its MPS control daemon "+how, resource.MPSLimits{})
}

// nextPause delays the next start after a daemon that ran for so long, or could not be started.
func (w *worker) nextPause(ran time.Duration) time.Duration {
	if ran >= steadyTime {
		w.restartPause = 0
	}
	pause := max(w.restartPause, minPause)
	w.restartPause = min(2*pause, maxPause)
	w.startAfter = time.Now().Add(pause)
	return pause
}

// The pause before a restart doubles from minPause to maxPause. A daemon that ran for steadyTime resets it.
const (
	minPause   = 100 * time.Millisecond
	maxPause   = 30 * time.Second
	steadyTime = time.Minute
)

// observe returns the daemon's state. The error is why it does not answer.
func (w *worker) observe(ctx context.Context, desired *Daemon) (state, error) {
	s := state{
		now: time.Now(), startAfter: w.startAfter, runs: w.proc.runs(), prepared: w.exclusive || prepared(w.dir),
		patience: patience * w.supervisor.opts.Deadline,
	}
	if !s.runs {
		return s, nil
	}
	truncateLogs(w.dir)
	err := w.query(ctx, desired, &s)
	s.answers = err == nil
	switch {
	case s.answers:
		w.silent, w.answered = time.Time{}, true
	case w.silent.IsZero() && !w.isStarting():
		w.silent = s.now
	}
	if !w.silent.IsZero() {
		s.silent = time.Since(w.silent)
	}
	s.serving = w.proc.hasChildren()
	return s, err
}

// query requests the rest of the state from the daemon.
func (w *worker) query(ctx context.Context, desired *Daemon, s *state) error {
	ctx, cancel := w.requestContext(ctx)
	defer cancel()
	c, err := w.supervisor.control(ctx, w.dir)
	if err != nil {
		return err
	}
	s.stale = c.program.Driver != w.driver
	if desired != nil {
		has, err := c.limited(ctx, desired.Limits)
		if err != nil {
			return err
		}
		// The daemon's answer is rounded, so it proves less than that the same limits were set.
		s.limited = has && w.given == desired.Limits
	}
	if desired == nil || s.stale {
		s.busy, err = c.busy(ctx)
	}
	return err
}

// isStarting reports whether the daemon may not be able to answer yet.
func (w *worker) isStarting() bool {
	return !w.answered && time.Since(w.since) < patience*w.supervisor.opts.Deadline
}

// requestContext is for all requests of one reconciliation. It ends at the deadline, however many answers a container
// delays, and when the daemon's process ends.
func (w *worker) requestContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, w.supervisor.opts.Deadline)
	stop := context.AfterFunc(w.proc.ended, cancel)
	return ctx, func() { stop(); cancel() }
}

// publish updates the reason why containers cannot use the daemon.
func (w *worker) publish(desired *Daemon, s state, err error) {
	switch {
	case desired == nil || !s.runs:
	case err != nil && w.isStarting():
	case err != nil:
		w.fail("its MPS control daemon does not answer", err)
	case s.limited && w.exclusive:
		if w.setReason("", desired.Limits) {
			text := ": its MPS control daemon is ready; each client may use " + describe(desired.Limits)
			w.log.Info(w.uuid+text, "pid", w.proc.pid)
		}
	}
}

// setReason publishes the reason and the limits, and reports whether they have changed.
func (w *worker) setReason(reason string, ready resource.MPSLimits) bool {
	w.supervisor.mu.Lock()
	same := w.reason == reason && w.ready == ready
	w.reason, w.ready = reason, ready
	w.supervisor.mu.Unlock()
	if reason == "" {
		w.logged = ""
	}
	if !same {
		w.supervisor.opts.Changed()
	}
	return !same
}

// setOccupied publishes whether the GPU can be used without MPS.
func (w *worker) setOccupied(occupied bool) {
	w.exclusive = occupied
	w.supervisor.mu.Lock()
	same := w.occupied == occupied
	w.occupied = occupied
	w.supervisor.mu.Unlock()
	if !same {
		w.supervisor.opts.Changed()
	}
}

// infoOnce logs a condition when it begins.
func (w *worker) infoOnce(text string) {
	if w.logged != text {
		w.logged = text
		w.log.Info(w.uuid+": "+text, "pid", w.proc.pid)
	}
}

// fail publishes a problem and logs it: as a warning the first time, and for debugging while it lasts.
func (w *worker) fail(what string, err error) {
	text := what + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")
	log := w.log.Warn
	if w.logged == text {
		log = w.log.Debug
	}
	w.logged = text
	log(w.uuid + ": " + text)
	w.setReason(text, resource.MPSLimits{})
}

// The actions of decide. Each returns the time until the next reconciliation.

// start prepares the GPU and starts a daemon.
func (w *worker) start(ctx context.Context, desired *Daemon) time.Duration {
	if err := w.tryStart(ctx, desired); err != nil {
		pause := w.nextPause(0)
		if ctx.Err() == nil {
			w.fail("its MPS control daemon cannot be started", err)
		}
		return pause
	}
	w.since = time.Now()
	return startInterval
}

func (w *worker) tryStart(ctx context.Context, desired *Daemon) error {
	c, err := w.supervisor.control(ctx, w.dir)
	if err != nil {
		return err
	}
	if err := prepare(w.supervisor.opts.Dir, w.uuid, desired.Limits.SharedMemoryBytes); err != nil {
		return err
	}
	if err := w.supervisor.linkLibraries(c.program.Libraries); err != nil {
		return err
	}
	if err := w.makeExclusive(ctx); err != nil {
		return err
	}
	w.proc, err = c.helper.startDaemon(w.dir, c.program)
	w.driver = c.program.Driver
	return err
}

func (w *worker) makeExclusive(ctx context.Context) error {
	if err := w.supervisor.opts.Modes.SetExclusive(ctx, w.uuid, true); err != nil {
		return err
	}
	w.setOccupied(true)
	return nil
}

// limit sets the daemon's limits.
func (w *worker) limit(ctx context.Context, desired *Daemon) time.Duration {
	requests, cancel := w.requestContext(ctx)
	defer cancel()
	c, err := w.supervisor.control(requests, w.dir)
	if err == nil {
		err = c.limit(requests, desired.Limits)
	}
	if err == nil {
		err = resizeShm(w.dir, desired.Limits.SharedMemoryBytes)
	}
	switch {
	case err == nil && w.given == desired.Limits: // a container has changed them, and may do so again
		return retryInterval
	case err == nil:
		w.given = desired.Limits
		return 0
	}
	if ctx.Err() == nil && w.proc.runs() {
		w.fail("its MPS control daemon cannot be limited", err)
	}
	return retryInterval
}

// quit sends the command to end, and waits for the end.
func (w *worker) quit(ctx context.Context) time.Duration {
	requests, cancel := w.requestContext(ctx)
	defer cancel()
	c, err := w.supervisor.control(requests, w.dir)
	if err == nil {
		w.quitting = true
		err = c.quit(requests)
	}
	if err != nil && w.proc.runs() && ctx.Err() == nil {
		w.fail("its MPS control daemon does not end", err)
	}
	return w.awaitEnd(ctx)
}

// kill ends a daemon that does not answer.
func (w *worker) kill(ctx context.Context) time.Duration {
	w.log.Warn(w.uuid+": its MPS control daemon does not answer and has no server; it is killed", "pid", w.proc.pid)
	w.quitting = true
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		if err := w.proc.signal(sig); err != nil && !errors.Is(err, unix.ESRCH) {
			w.fail("its MPS control daemon cannot be killed", err)
			return w.supervisor.opts.Interval
		}
		if w.awaitEnd(ctx) == 0 {
			break
		}
	}
	return 0
}

// awaitEnd waits for the end of the daemon's process until the deadline.
func (w *worker) awaitEnd(ctx context.Context) time.Duration {
	timeout := time.NewTimer(w.supervisor.opts.Deadline)
	defer timeout.Stop()
	select {
	case <-w.proc.done():
		return 0
	case <-ctx.Done():
	case <-timeout.C:
	}
	return w.supervisor.opts.Interval
}

// release makes the GPU usable without MPS. Its directories stay, since containers may still have them mounted.
func (w *worker) release(ctx context.Context) time.Duration {
	err := w.supervisor.opts.Modes.SetExclusive(ctx, w.uuid, false)
	if err == nil {
		err = unmountShm(w.dir)
	}
	for _, name := range []string{outputName, lockName, recordName} {
		if err == nil {
			if err = os.Remove(filepath.Join(w.dir, name)); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	}
	if err != nil {
		if ctx.Err() == nil {
			w.fail("the GPU cannot be released for use without MPS", err)
		}
		return w.supervisor.opts.Interval
	}
	w.setOccupied(false)
	w.log.Info(w.uuid + ": the GPU is no longer shared by MPS")
	w.setReason(starting, resource.MPSLimits{})
	return w.supervisor.opts.Interval
}
