package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// Resetter resets GPUs.
type Resetter interface {
	// Ready returns why no reset would be tried now, or nil. It is asked before the driver is released.
	Ready() error
	// Reset resets a whole GPU that no process of this node is known to use. At the deadline of ctx a reset that began
	// is abandoned, with an *[AbandonedError]; if ctx is canceled, it is still waited for.
	Reset(ctx context.Context, d Device) (Outcome, error)
}

// AbandonedError reports that a reset has not ended in time. It goes on, also if this process ends before it: the GPU
// must not be used until then.
type AbandonedError struct {
	Wait func() (Outcome, error) // waits until it has ended
	Err  error                   // why it was not waited for any longer
}

// Error says that the reset goes on.
func (e *AbandonedError) Error() string {
	return fmt.Sprintf("the reset has not ended: %v; until it has, this program gives the GPU to no container", e.Err)
}

// Unwrap returns the cause.
func (e *AbandonedError) Unwrap() error { return e.Err }

// Outcome is how a reset ended.
type Outcome int

// The outcomes. All but ResetDone come with an error that says why.
const (
	ResetFailed       Outcome = iota
	ResetDone                 // the GPU was reset
	ResetBusy                 // a process has the GPU open, or the GPU is still busy: a later try may succeed
	ResetNotSupported         // the GPU or the machine has no reset, as virtual machines
	ResetRefused              // the GPU cannot be reset alone or as it is used: by NVSwitches, or as the primary GPU
)

// Times around a reset.
const (
	// resetReserve is what is left of the deadline for the probes after a reset.
	resetReserve = 2 * time.Second
	// How long reopening the driver may take, and switching persistence mode on again, which waits for the resets of
	// other GPUs. Both are done after the deadline too.
	reopenLimit      = 10 * time.Second
	persistenceLimit = 30 * time.Second
)

// whyNotReset returns why the GPU cannot be reset, as far as that is known without trying, or "".
func (x *run) whyNotReset() string {
	if why := x.whyNotAlone(); why != "" {
		return why
	}
	if x.opts.Resetter == nil {
		return "there is nothing that resets GPUs"
	}
	if why := x.opts.State.CannotReset(x.d.GPU); why != "" && !x.manual {
		return why + " (tried before)"
	}
	return ""
}

// resetDue reports whether the GPU is to be reset.
func (x *run) resetDue() bool { return x.rules.Policy == Reset && x.whyNotReset() == "" }

// endPersistence switches persistence mode off before a reset: the mode keeps the GPU in use.
func (x *run) endPersistence(ctx context.Context) (string, error) {
	if !x.resetDue() || x.resetBefore() {
		return "", errNotDue
	}
	changed, err := x.opts.Driver.SetPersistence(ctx, x.d.GPU, false)
	if err != nil { // the reset shows whether that matters
		return "", skippedError("persistence mode cannot be switched off: " + err.Error())
	}
	x.persistent = changed
	return "", nil
}

// restorePersistence switches persistence mode on if endPersistence has switched it off, also after the deadline. While
// an abandoned reset goes on it does nothing.
func (x *run) restorePersistence(ctx context.Context) {
	if !x.persistent || x.resetting != nil {
		return
	}
	x.persistent = false
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), persistenceLimit)
	defer cancel()
	err := x.gate.use(ctx, func() error {
		_, err := x.opts.Driver.SetPersistence(ctx, x.d.GPU, true)
		return err
	})
	if err != nil { // the record may have been returned already
		x.opts.Log.Warn("the persistence mode of " + x.d.GPU + " was switched off for a reset and cannot be switched on " +
			"again (nvidia-smi -i " + x.d.GPU + " -pm 1 does that): " + plain(err.Error()))
	}
}

// reset resets the GPU and probes it again.
func (x *run) reset(ctx context.Context) (string, error) {
	if x.rules.Policy != Reset {
		return "", errNotDue
	}
	if why := x.whyNotReset(); why != "" {
		return "", x.withoutReset(why)
	}
	if x.resetBefore() {
		x.wasReset = true
		x.setUnusedReset(time.Time{}) // what is found wrong from now on is a reason to reset it again
		return "it was reset before, and no container has had it since", x.awaitHealthy(ctx)
	}
	outcome, err := x.tryUntilReset(ctx)
	if abandoned, ok := errors.AsType[*AbandonedError](err); ok {
		x.resetting = abandoned.Wait
	}
	switch outcome {
	case ResetDone: // an error is that the driver could not be reopened, which is tried again
		x.resetDone()
		return "", x.awaitHealthy(ctx)
	case ResetNotSupported, ResetRefused:
		x.opts.State.SetCannotReset(x.d.GPU, plain(err.Error()))
		return "", x.withoutReset(err.Error())
	case ResetBusy:
		users, unknown := openers(ctx, x.opts.Host, x.d.Nodes)
		switch {
		case unknown != nil:
			err = fmt.Errorf("%w; the processes that have it open are unknown: %w", err, unknown)
		case len(users) > 0:
			err = inUseError{fmt.Errorf("%w: %s has the GPU open: end it", err, list(users))}
		}
	}
	return "", err
}

// resetDone notes that the GPU was reset, in time or later.
func (x *run) resetDone() {
	x.wasReset = true
	x.setUnusedReset(time.Now())
	x.opts.State.WasReset(x.d.GPU)
}

// awaitAbandoned waits until the reset that was abandoned has ended.
func (x *run) awaitAbandoned() {
	outcome, err := x.resetting()
	x.resetting = nil
	if outcome != ResetDone {
		x.opts.Log.Warn("the reset of " + x.d.GPU + " that took too long has failed: " + plain(err.Error()))
		return
	}
	x.resetDone()
	x.opts.Log.Info(x.d.GPU + " was reset, though too late for the container or command that waited for it")
}

// unusedResetLimit is how long a reset after which no container got the GPU makes another one unnecessary. The kubelet
// starts its container again within 5 minutes.
const unusedResetLimit = 6 * time.Minute

// resetBefore reports whether the GPU was reset for a try that failed, so that it need not be reset again. Otherwise a
// GPU whose reset takes longer than the kubelet waits would be reset again and again.
func (x *run) resetBefore() bool {
	if x.manual || x.needsReset != nil {
		return false
	}
	x.Runner.mu.Lock()
	defer x.Runner.mu.Unlock()
	return time.Since(x.unusedResets[x.d.GPU]) < unusedResetLimit
}

// setUnusedReset sets when the GPU was reset without a container since; zero means that it has to be reset again.
func (x *run) setUnusedReset(at time.Time) {
	x.Runner.mu.Lock()
	defer x.Runner.mu.Unlock()
	if at.IsZero() {
		delete(x.unusedResets, x.d.GPU)
		return
	}
	x.unusedResets[x.d.GPU] = at
}

// withoutReset is the result of a reset that cannot be made: the step is skipped or, with Rules.Strict or if only a
// reset can mend the device, failed.
func (x *run) withoutReset(why string) error {
	if x.needsReset != nil {
		return fmt.Errorf("%w, and the GPU cannot be reset: %s", x.needsReset, why)
	}
	if x.rules.Strict {
		return errors.New("the GPU must be reset and cannot be: " + why)
	}
	return skippedError("not reset: " + why)
}

// checkNotOpen passes if a reset can be tried and no process but this one has the GPU open. It is a part of the reset
// that is done before the driver is released. Processes that are about to close the GPU are waited for.
func (x *run) checkNotOpen(ctx context.Context) error {
	if !x.resetDue() || x.resetBefore() {
		return nil
	}
	if err := x.opts.Resetter.Ready(); err != nil {
		return err
	}
	return x.awaitUnused(ctx, func(ctx context.Context) error {
		users, _ := openers(ctx, x.opts.Host, x.d.Nodes, os.Getpid()) // where they are unknown, the reset shows it
		if len(users) == 0 {
			return nil
		}
		return inUseError{fmt.Errorf("%s has the GPU open, so it cannot be reset: end it", list(users))}
	})
}

// checkBeforeReset does the checks of step reset that come before the driver is released. If they pass it records
// nothing: reset, which runs after it, records the step.
func (x *run) checkBeforeReset(ctx context.Context) (string, error) {
	return "", cmp.Or(x.checkNotOpen(ctx), errNotDue)
}

// tryUntilReset resets the GPU, again and again while it is busy. Between the tries the driver is open, and other GPUs
// are prepared. If the deadline is the only reason why a try failed, the result is that of the try before, which knows
// more.
func (x *run) tryUntilReset(ctx context.Context) (Outcome, error) {
	reserved := ctx
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		reserved, cancel = context.WithDeadline(ctx, deadline.Add(-min(resetReserve, time.Until(deadline)/4)))
		defer cancel()
	}
	var busy error // of the try before
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		outcome := ResetFailed
		reopened := true
		err := x.gate.reset(reserved,
			func() error { return x.opts.Driver.Release(reserved) },
			func() error {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reopenLimit)
				defer cancel()
				err := x.opts.Driver.Reopen(ctx)
				reopened = err == nil
				return err
			},
			func() error {
				var err error
				outcome, err = x.opts.Resetter.Reset(reserved, x.d)
				if err == nil && outcome != ResetDone {
					err = errors.New("no reason is known")
				}
				return err
			})
		if busy != nil && reopened && isOnlyEndOf(reserved, err) {
			return ResetBusy, busy
		}
		if outcome != ResetBusy || !reopened || !sleep(reserved, pause) {
			return outcome, err
		}
		busy = err
		open := x.gate.use(reserved, func() error { return x.checkNotOpen(reserved) })
		switch {
		case reserved.Err() != nil:
			return outcome, err
		case open != nil:
			return ResetFailed, open
		}
	}
}

// isOnlyEndOf reports whether an error says no more than that ctx has ended: not what hangs, for example.
func isOnlyEndOf(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() != nil && err.Error() == context.Cause(ctx).Error()
}

// awaitHealthy waits until the GPU is healthy after its reset.
func (x *run) awaitHealthy(ctx context.Context) error {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := x.gate.use(ctx, func() error { return x.healthy(ctx) })
		if err == nil {
			return nil
		}
		if !sleep(ctx, pause) {
			return fmt.Errorf("after the reset: %w; if this stays, reboot the node", err)
		}
	}
}
