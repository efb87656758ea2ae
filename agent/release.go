package agent

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
)

// releaser closes the driver's library when an administrator requests it. It is an actor.
type releaser struct {
	host    host.Host
	node    *node.Reconciler
	monitor *node.Monitor
	runner  *prepare.Runner
	changed wake.Chan // woken when the result of checkOpen has changed
	log     *slog.Logger

	current  atomic.Pointer[release] // nil while the driver is not released
	requests chan *release
}

// release is one request to close the driver, and the time until the driver is opened again.
type release struct {
	began    chan error      // receives one value: nil, or why the driver cannot be released
	released context.Context // ends when the driver must be opened again
	end      func()          // ends released
	done     chan struct{}   // closed after the release
	err      error           // why the driver cannot be opened again; set before done is closed
}

var (
	errReleased = errors.New("an administrator has released the NVIDIA driver; " +
		"open it again with: gpu-cdi-plugin device reopen")
	errNotReleased = errors.New("the NVIDIA driver is not released")
)

const (
	// releaseLimit is how long to wait until no call uses the driver.
	releaseLimit = 30 * time.Second
	// releasePoll is how often it is checked whether the kernel module was loaded again after a release.
	releasePoll = time.Second
)

// checkOpen returns errReleased while the driver is released, since no device can be prepared then.
func (r *releaser) checkOpen() error {
	if r.current.Load() != nil {
		return errReleased
	}
	return nil
}

// released returns a channel that is closed when the release ends, or nil if the driver is not released.
func (r *releaser) released() <-chan struct{} {
	if one := r.current.Load(); one != nil {
		return one.done
	}
	return nil
}

// release closes the driver's library. If ctx ends before that, the library is opened again.
func (r *releaser) release(ctx context.Context) error {
	released, end := context.WithCancel(context.WithoutCancel(ctx))
	one := &release{began: make(chan error, 1), released: released, end: end, done: make(chan struct{})}
	if !r.current.CompareAndSwap(nil, one) {
		return errReleased
	}
	select {
	case r.requests <- one:
	case <-ctx.Done():
		r.current.Store(nil)
		close(one.done)
		return context.Cause(ctx)
	}
	select {
	case err := <-one.began:
		return err
	case <-ctx.Done():
		one.end()
		<-one.done
		return context.Cause(ctx)
	}
}

// reopen ends a release.
func (r *releaser) reopen(ctx context.Context) error {
	one := r.current.Load()
	if one == nil {
		return errNotReleased
	}
	one.end()
	select {
	case <-one.done:
		return one.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run carries out releases until ctx ends. If a release is in progress then, run does not open the driver again: an
// administrator may be unloading its kernel module, and opening the driver would load it again.
func (r *releaser) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case one := <-r.requests:
			r.keepReleased(ctx, one)
		}
	}
}

// keepReleased carries out one release, and returns when it has ended.
func (r *releaser) keepReleased(ctx context.Context, one *release) {
	defer close(one.done)
	defer r.changed.Wake()
	defer r.current.Store(nil)
	limited, cancel := context.WithTimeout(ctx, releaseLimit)
	defer cancel()
	stop := context.AfterFunc(one.released, cancel) //nolint:contextcheck // an interrupted request ends the wait too
	defer stop()
	closed, reloaded := false, false
	loaded := host.LoadedDriver(r.host) // an administrator may unload the module once the library is closed
	err := r.runner.WithoutDriver(limited, "it is released", func() (reopen bool) {
		closed = true
		one.began <- nil
		// Not only a remark: a release that follows the end of another at once is logged too.
		r.log.Warn("the NVIDIA driver is released: its devices stay advertised, but no container with one can start " +
			"until gpu-cdi-plugin device reopen or until the driver is loaded again")
		r.changed.Wake()
		reopen, reloaded = r.awaitEnd(ctx, one, loaded)
		return reopen
	})
	if !closed {
		one.began <- err
		return
	}
	one.err = err
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		r.log.Error("the NVIDIA driver cannot be opened again; each reconciliation retries: " +
			wording.OneLine(err))
	default:
		r.log.Info("the NVIDIA driver is opened again")
	}
	if s := r.node.State().Snapshot; reloaded && s != nil { // loading a module initialises the GPUs
		for i := range s.Devices {
			r.monitor.WasReset(s.Devices[i].UUID)
		}
	}
	r.node.Trigger()
}

// awaitEnd waits until an administrator ends a release, or until the kernel module was loaded again. `before` is the
// module before the release. If the library was replaced, the program restarts later. `reopen` says whether to open
// the driver; it is false if ctx ends. `reloaded` says whether the module was unloaded or replaced.
func (r *releaser) awaitEnd(ctx context.Context, one *release, before host.KernelDriver) (reopen, reloaded bool) {
	poll := time.NewTicker(releasePoll)
	defer poll.Stop()
	for {
		ended := false
		select {
		case <-ctx.Done():
			return false, false
		case <-one.released.Done():
			ended = true
		case <-poll.C:
		}
		now := host.LoadedDriver(r.host) // does not change if the host does not report it
		reloaded = reloaded || now != before
		switch {
		case ended:
			return true, reloaded
		case reloaded && now.Version != "":
			r.log.Info("the NVIDIA kernel module was loaded again, which ends the release")
			return true, true
		}
	}
}
