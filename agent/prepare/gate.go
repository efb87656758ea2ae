package prepare

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// gate keeps calls of the driver and resets apart: a reset is refused while a process has the driver open. Any number
// of calls can be made at once, and any number of GPUs reset at once.
type gate struct {
	mu            sync.Mutex
	calls, resets int
	waiting       int // resets that wait for calls; new calls wait for them
	// switching is whether the driver is being released or reopened.
	switching bool
	changed   chan struct{} // closed at the next change; nil if nothing waits
}

// use calls the driver. It waits for resets.
func (g *gate) use(ctx context.Context, call func() error) error {
	if err := g.beginCall(ctx); err != nil {
		return err
	}
	defer g.change(func() { g.calls-- })
	return call()
}

func (g *gate) beginCall(ctx context.Context) error {
	return g.enter(ctx, func() bool { return g.resets == 0 && g.waiting == 0 }, func() { g.calls++ })
}

// pause lets resets begin for a time, in a call of use. It reports whether the driver may be called again: not after
// the end of ctx.
func (g *gate) pause(ctx context.Context, d time.Duration) bool {
	g.change(func() { g.calls-- })
	if sleep(ctx, d) && g.beginCall(ctx) == nil {
		return true
	}
	g.change(func() { g.calls++ }) // use decrements it
	return false
}

// gather is how long a reset, which takes seconds, waits for preparations that begin at the same time, as those of a
// pod with several GPUs: the GPUs that are checked before the first reset begins are reset together.
const gather = 100 * time.Millisecond

// reset resets a GPU. It waits for calls. Before the first of several resets at one time the driver is released, and
// reopened after the last.
func (g *gate) reset(ctx context.Context, release, reopen, work func() error) error {
	if !sleep(ctx, gather) {
		return context.Cause(ctx)
	}
	first := false
	g.change(func() { g.waiting++ })
	err := g.enter(ctx, func() bool { return g.calls == 0 && !g.switching }, func() {
		g.resets++
		first = g.resets == 1
		g.switching = first
	})
	g.change(func() { g.waiting-- })
	if err != nil {
		return err
	}
	if first {
		if err = release(); err == nil { // otherwise no other reset begins before the driver is reopened
			g.change(func() { g.switching = false })
		}
	}
	if err == nil {
		err = work()
	}
	last := false
	g.change(func() {
		if last = g.resets == 1; last {
			g.switching = true
		} else {
			g.resets--
		}
	})
	if last {
		err = errors.Join(err, reopen())
		g.change(func() { g.switching, g.resets = false, 0 })
	}
	return err
}

// enter makes a change as soon as it may be made.
func (g *gate) enter(ctx context.Context, may func() bool, change func()) error {
	for {
		g.mu.Lock()
		if may() {
			change()
			g.mu.Unlock()
			return nil
		}
		if g.changed == nil {
			g.changed = make(chan struct{})
		}
		changed := g.changed
		g.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait until the driver is free (it is released, or a GPU is prepared or reset): %w",
				context.Cause(ctx))
		}
	}
}

func (g *gate) change(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// WithoutDriver closes the driver while work runs, as for a reset: calls of the driver and the first of several resets
// wait for it. Ctx limits how long it takes to close the driver. Work reports whether to open the driver again; without
// that no device can be prepared any more. If the driver cannot be closed, work is not run.
func (r *Runner) WithoutDriver(ctx context.Context, work func() (reopen bool)) error {
	again := true
	return r.gate.reset(ctx,
		func() error { return r.opts.Driver.Release(ctx) },
		func() error {
			if !again {
				return nil
			}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reopenLimit)
			defer cancel()
			return r.opts.Driver.Reopen(ctx)
		},
		func() error {
			again = work()
			return nil
		})
}
