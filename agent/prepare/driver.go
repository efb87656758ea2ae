package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// wholeDriver is more than the number of concurrent calls of the driver.
const wholeDriver = 1 << 30

// closing is a time during which the driver is closed.
type closing struct {
	why    string // such as "it is released"
	since  time.Time
	opened chan struct{} // closed when the driver is open again
}

// WithoutDriver closes the driver while work runs. It waits for calls of the driver and for resets, and blocks new
// ones. Ctx limits the wait and the closing of the driver. Work reports whether to open the driver again; if not, no
// device can be prepared any more. If the driver cannot be closed, work is not run. The text `why` is for errors of
// preparations that wait meanwhile, such as "it is released".
func (r *Runner) WithoutDriver(ctx context.Context, why string, work func() (reopen bool)) error {
	if err := r.hold(ctx, wholeDriver); err != nil {
		return err
	}
	defer r.driver.Release(wholeDriver)
	return r.whileClosed(ctx, why, work)
}

// whileClosed does what WithoutDriver does, for a caller that holds the whole driver.
func (r *Runner) whileClosed(ctx context.Context, why string, work func() (reopen bool)) error {
	if err := r.setClosed(why); err != nil {
		return err
	}
	defer r.setOpen()
	err := r.opts.Driver.Release(ctx)
	if err == nil && !work() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reopenLimit)
	defer cancel()
	return errors.Join(err, r.opts.Driver.Reopen(ctx))
}

func (r *Runner) setClosed(why string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keepOpen {
		return errors.New("the driver cannot be closed now, since this program is restarting or another instance takes over")
	}
	r.closed = &closing{why: why, since: time.Now(), opened: make(chan struct{})}
	return nil
}

func (r *Runner) setOpen() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.closed.opened)
	r.closed = nil
}

// Closed returns a channel that is closed when the driver is open again, or nil if it is open.
func (r *Runner) Closed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed == nil {
		return nil
	}
	return r.closed.opened
}

// KeepOpen keeps the driver open until AllowClosing, since a new process is about to open the driver, also while a GPU
// would be reset. If the driver is closed, KeepOpen only returns a channel that is closed when it is open again.
func (r *Runner) KeepOpen() (opened <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed != nil {
		return r.closed.opened
	}
	r.keepOpen = true
	return nil
}

// AllowClosing ends KeepOpen.
func (r *Runner) AllowClosing() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keepOpen = false
}

// withDriver calls the driver, after waiting while it is closed.
func (r *Runner) withDriver(ctx context.Context, call func() error) error {
	if err := r.hold(ctx, 1); err != nil {
		return err
	}
	defer r.driver.Release(1)
	return call()
}

func (r *Runner) hold(ctx context.Context, weight int64) error {
	if r.driver.Acquire(ctx, weight) != nil {
		return fmt.Errorf("wait for the driver (%s): %w", r.whyNotFree(), context.Cause(ctx))
	}
	return nil
}

// whyNotFree returns why one must wait for the driver.
func (r *Runner) whyNotFree() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed == nil {
		return "other devices are being prepared"
	}
	return r.closed.why + ", since " + timeText(r.closed.since)
}
