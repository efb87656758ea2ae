package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
)

// Two instances of Serve hand over as follows. The new one sends hold-open, so that no GPU is reset while it opens the
// driver, and reads the node. Then it sends hand-over. The old one ends all that writes files, and answers. The new one
// publishes what it has read and registers its doors with the kubelet beside the old one's. Then it ends hold-open,
// and the old one ends its doors. It goes on to answer on its address for health.
//
// A kubelet before 1.37 loses the new plugin with the old one, and the new one registers again at once.
//
// The door dra of the old one answers until the kubelet has closed its connection (dra.Driver.Retire). That of the new
// one has calls wait until then, so that only one of the two ledgers decides at a time (dra.Driver.RestoreAfter).

// ErrSuccessorEnded means that the instance that had taken over has ended, so that this one must be started again.
var ErrSuccessorEnded = errors.New("the instance that had taken over has ended")

// errHandedOver means that another instance has taken over.
var errHandedOver = errors.New("another instance has taken over")

const (
	// holdLimit is how long the driver is held open for a new instance, and handOverLimit how long a hand-over may take:
	// waiting for preparations twice, and the end of what writes files.
	holdLimit     = 2 * time.Minute
	handOverLimit = 2 * time.Minute
	// takeOverPause is the time between two attempts to take over.
	takeOverPause = time.Second
	// endingLimit is how long the files may be locked by an instance that does not answer. It is longer than
	// Kubernetes waits until it kills a pod.
	endingLimit = time.Minute
	// standByPoll is how often it is checked whether the instance that has taken over runs.
	standByPoll = time.Second
	// overlapLimit is how long two instances are registered if the kubelet does not watch the new one.
	overlapLimit = 10 * time.Second
)

// handOver ends the service when another instance takes over. It is an actor.
type handOver struct {
	node     *node.Reconciler
	runner   *prepare.Runner
	log      *slog.Logger
	releaser *releaser

	holder   atomic.Pointer[chan struct{}] // closed when the instance that is about to take over ends hold-open
	requests chan (<-chan struct{})        // receives one holder, which ends all but the plugin
	begun    atomic.Bool                   // whether it has
	ended    chan struct{}                 // closed when all but the plugin has ended
	released <-chan struct{}               // that holder; only the goroutine of run uses it, and awaitOther later
}

func newHandOver(n *node.Reconciler, r *prepare.Runner, rel *releaser, log *slog.Logger) *handOver {
	return &handOver{
		node: n, runner: r, releaser: rel, log: log, requests: make(chan (<-chan struct{})), ended: make(chan struct{}),
	}
}

// preparationLimit is how long a restart waits for preparations while the plugin is served. Each has 25 s.
const preparationLimit = 30 * time.Second

// keepOpen does what role.keepOpen says.
func (h *handOver) keepOpen(ctx context.Context) (until string, opened <-chan struct{}) {
	if released := h.releaser.released(); released != nil {
		return "the driver is no longer released (run: gpu-cdi-plugin device reopen)", released
	}
	const ended = "the reset of a GPU has ended or counts as hung"
	if opened := h.runner.Closed(); opened != nil {
		return ended, opened
	}
	waiting, cancel := context.WithTimeout(ctx, preparationLimit)
	defer cancel()
	h.runner.Wait(waiting)
	return ended, h.runner.KeepOpen() // a reset may have begun meanwhile
}

// hold keeps the driver open until ctx ends, and reports progress when it does.
func (h *handOver) hold(ctx context.Context, progress func(string)) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, holdLimit, errors.New("it was not taken over in time"))
	defer cancel()
	gone := make(chan struct{})
	if !h.holder.CompareAndSwap(nil, &gone) {
		return "", errors.New("another instance is already taking over")
	}
	defer h.holder.Store(nil)
	if h.begun.Load() { // and the instance that took over is gone
		return "", errHandedOver
	}
	if until, opened := h.keepOpen(ctx); opened != nil {
		return "", errors.New("no instance can take over until " + until)
	}
	defer func() {
		close(gone)
		if !h.begun.Load() {
			h.runner.AllowClosing()
		}
	}()
	progress("the driver stays open")
	<-ctx.Done()
	return "", context.Cause(ctx)
}

// handOver ends all but the plugin.
func (h *handOver) handOver(ctx context.Context, noDriver bool) (string, error) {
	holder := h.holder.Load()
	if holder == nil {
		return "", errors.New("the driver is not held open: send hold-open before")
	}
	if s := h.node.State(); noDriver && s.Err == nil && s.Snapshot != nil && len(s.Snapshot.Devices) > 0 {
		return "", errors.New("this instance can use the driver, and the one that would take over cannot")
	}
	if until, opened := h.keepOpen(ctx); opened != nil { // devices may be prepared again since hold
		return "", errors.New("no instance can take over until " + until)
	}
	select {
	case h.requests <- *holder:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	select {
	case <-h.ended:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	return "this instance has ended all but its plugin", nil
}

// awaitOther answers the other instance that all but the plugin has ended, and waits until it serves too, or has ended.
func (h *handOver) awaitOther(ctx context.Context) {
	close(h.ended)
	select {
	case <-ctx.Done():
	case <-h.released:
	}
}

// run returns errHandedOver when another instance takes over.
func (h *handOver) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case h.released = <-h.requests:
	}
	h.begun.Store(true)
	h.log.Info("another instance takes over: this one ends its service, and continues to report health")
	return errHandedOver
}

// idle says why the service does not serve the node.
type idle struct {
	text string
	// ready says that another instance serves the node and needs this one no longer.
	ready bool
}

// takeOver locks the node's files. If another instance has locked them, and the configuration says so, that instance
// hands over first. Without an error, the files are locked or ctx has ended.
func (d *daemon) takeOver(ctx context.Context) error {
	var unanswered time.Time // since when no instance answers
	for ctx.Err() == nil {
		locked := d.node.Lock()
		if !d.takesOver || !errors.Is(locked, fileio.ErrHeld) {
			d.idle.Store(nil)
			return locked
		}
		d.idle.CompareAndSwap(nil, &idle{text: "another instance serves this node and is about to hand over"})
		err := d.requestHandOver(ctx)
		ended := hasEnded(err)
		if !ended {
			unanswered = time.Time{}
		}
		switch {
		case err == nil, ctx.Err() != nil:
		case ended && unanswered.IsZero(): // it has just ended, or is about to
			unanswered = time.Now()
		case ended && time.Since(unanswered) > endingLimit:
			return fmt.Errorf("%w; %w", locked, err)
		default:
			if isFatal(err) {
				return fmt.Errorf("take over from another instance: %w", err)
			}
			d.awaitTakeOver(ctx, err)
		}
	}
	return nil
}

// hasEnded reports whether the error of a request means that the other instance has ended or is about to.
func hasEnded(err error) bool {
	return errors.Is(err, control.ErrNoServer) || errors.Is(err, unixsocket.ErrEnded)
}

// isFatal reports whether another attempt to take over would fail too.
func isFatal(err error) bool {
	_, fatal := errors.AsType[*fatalError](err)
	return fatal || errors.Is(err, control.ErrNotAllowed) || errors.Is(err, control.ErrOtherVersion)
}

// fatalError means that this instance cannot serve the node, so that it must not take over.
type fatalError struct{ error }

func (e *fatalError) Unwrap() error { return e.error }

// requestHandOver reads the node while another instance serves it, and has that instance end its service.
func (d *daemon) requestHandOver(ctx context.Context) error {
	if d.release != nil { // a third instance was faster
		d.release()
		d.release = nil
	}
	holding, end := context.WithCancel(ctx)
	ctx, cancel := context.WithTimeoutCause(ctx, handOverLimit, errors.New("it does not answer"))
	defer cancel()
	held, ended := make(chan struct{}), make(chan error, 1)
	once := sync.OnceFunc(func() { close(held) })
	go func() {
		_, err := control.Send(holding, d.opts.Config.RuntimeDir, control.Request{Act: control.HoldOpen},
			func(string) { once() })
		ended <- err
	}()
	release := sync.OnceFunc(func() {
		end()
		<-ended //nolint:errcheck // the request has no result
	})
	select {
	case err := <-ended:
		end()
		return err
	case <-ctx.Done():
		release()
		return context.Cause(ctx)
	case <-held:
	}
	defer func() {
		if d.release == nil {
			release()
		}
	}()
	waiting := d.opts.LogSlowCalls()
	err := d.node.Scan(ctx)
	waiting.Stop()
	noDriver := errors.Is(err, gpu.ErrNoDriver) && !d.opts.Config.FailOnInitError
	if err != nil && !noDriver {
		return &fatalError{err}
	}
	began := time.Now()
	r := control.Request{Act: control.HandOver, NoDriver: noDriver}
	if _, err := control.Send(ctx, d.opts.Config.RuntimeDir, r, func(string) {}); err != nil {
		d.node.ForgetScan()
		d.closeDriver() // the other instance may reset GPUs
		return err
	}
	d.release = release
	d.opts.Log.Info("another instance has handed over", "took", time.Since(began).Round(time.Microsecond))
	return nil
}

// endOverlap lets the other instance, if there is one, end its doors when the kubelet has registered this one's and
// watches its plugin.
func (d *daemon) endOverlap(ctx context.Context) error {
	for limit, over := time.After(overlapLimit), false; d.release != nil && !over && d.role.ready() != nil; {
		select {
		case <-ctx.Done():
			return nil
		case <-d.watched:
		case <-limit:
			over = true
		}
	}
	if d.release != nil {
		d.release()
	}
	if d.alone == nil {
		return nil
	}
	return d.alone(ctx)
}

// awaitTakeOver waits until the next attempt to take over. It logs the reason when that has changed, and once a minute.
func (d *daemon) awaitTakeOver(ctx context.Context, reason error) {
	text := "another instance serves this node and does not hand over yet: " + wording.OneLine(reason)
	if before := d.idle.Swap(&idle{text: text}); before == nil || before.text != text ||
		time.Since(d.logged) > repeatAfter {
		d.logged = time.Now()
		d.opts.Log.Warn(text)
	}
	select {
	case <-ctx.Done():
	case <-time.After(takeOverPause):
	}
}

// standBy waits until ctx ends. If the instance that has taken over ends before that, it returns ErrSuccessorEnded.
func (d *daemon) standBy(ctx context.Context) error {
	const text = "another instance has taken over and serves this node; this one waits for its end"
	d.idle.Store(&idle{text: text, ready: true})
	d.closeDriver()
	d.metrics.Clear()
	d.opts.Log.Info(text)
	d.logUnsent(d.systemd.Status(text))
	poll := time.NewTicker(standByPoll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-poll.C:
		}
		if other, err := d.node.OtherLocked(); err == nil && !other {
			return ErrSuccessorEnded
		}
	}
}
