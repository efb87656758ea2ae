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
	// Reset resets whole GPUs that no process of this node is known to use, and returns a result for each. It is not
	// called again before it has returned. At the deadline of ctx resets that began are abandoned: their errors are
	// *[AbandonedError]. If ctx is canceled, they are still waited for.
	Reset(ctx context.Context, gpus []Device) []ResetResult
}

// ResetResult is how the reset of a GPU ended. Unless that is ResetDone, Err says why.
type ResetResult struct {
	Outcome Outcome
	Err     error
}

// Outcome is how a reset ended.
type Outcome int

// The outcomes.
const (
	ResetFailed       Outcome = iota
	ResetDone                 // the GPU was reset
	ResetBusy                 // a process has the GPU open, or the GPU is still busy: a later try may succeed
	ResetNotSupported         // the GPU or the machine has no reset, like most virtual machines
	ResetRefused              // the GPU cannot be reset alone or as it is used: by NVSwitches, or as the primary GPU
)

// AbandonedError reports that a reset has not ended in time. It goes on, also if this process ends before it: the GPU
// must not be used until then.
type AbandonedError struct {
	Wait func() ResetResult // waits until it has ended
	Err  error              // why it was not waited for any longer
}

// Error says that the reset goes on.
func (e *AbandonedError) Error() string {
	return fmt.Sprintf("the reset has not ended: %v; until it has, this program gives the GPU to no container", e.Err)
}

// Unwrap returns the cause.
func (e *AbandonedError) Unwrap() error { return e.Err }

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
func (x *target) whyNotReset() string {
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

// willReset reports whether the GPU is to be reset, or was.
func (x *target) willReset() bool { return x.rules.Policy == Reset && x.whyNotReset() == "" }

// endPersistence switches persistence mode off before a reset: the mode keeps the GPU in use.
func (x *target) endPersistence(ctx context.Context) (string, error) {
	if !x.willReset() || x.resetBefore() {
		return "", errNotDue
	}
	changed, err := x.opts.Driver.SetPersistence(ctx, x.d.GPU, false)
	if err != nil { // the reset shows whether that matters
		return "", skippedError("persistence mode cannot be switched off: " + err.Error())
	}
	x.persistent = changed
	return "", nil
}

// restorePersistence switches persistence mode on if endPersistence has switched it off, also after the deadline.
func (x *target) restorePersistence(ctx context.Context) {
	if !x.persistent {
		return
	}
	x.persistent = false
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), persistenceLimit)
	defer cancel()
	err := x.withDriver(ctx, func() error {
		_, err := x.opts.Driver.SetPersistence(ctx, x.d.GPU, true)
		return err
	})
	if err != nil { // the record may have been returned already
		x.opts.Log.Warn("the persistence mode of " + x.d.GPU + " was switched off for a reset and cannot be switched on " +
			"again (nvidia-smi -i " + x.d.GPU + " -pm 1 does that): " + plain(err.Error()))
	}
}

// checkBeforeReset decides whether the GPU is to be reset, and checks what would keep it from that before the driver is
// closed for all GPUs. The step is recorded here only if there is no reset.
func (x *target) checkBeforeReset(ctx context.Context) (string, error) {
	if x.rules.Policy != Reset {
		return "", errNotDue
	}
	if why := x.whyNotReset(); why != "" {
		return "", x.withoutReset(why)
	}
	if x.resetBefore() {
		x.wasReset, x.resetNote = true, "it was reset before, and no container has had it since"
		x.setUnusedReset(time.Time{}) // what is found wrong from now on is a reason to reset it again
		return "", errNotDue
	}
	if err := x.opts.Resetter.Ready(); err != nil {
		return "", err
	}
	x.resetDue = true
	return "", cmp.Or(x.checkNotOpen(ctx), errNotDue)
}

// checkNotOpen passes if no process but this one has the GPU open.
func (x *target) checkNotOpen(ctx context.Context) error {
	users, _ := openers(ctx, x.opts.Host, x.d.Nodes, os.Getpid()) // where they are unknown, the reset shows it
	if len(users) == 0 {
		return nil
	}
	return inUseError{fmt.Errorf("%s has the GPU open, so it cannot be reset: end it", list(users))}
}

// reset resets the GPUs that are due, and reports whether all are healthy then, or can be used without a reset.
func (p *preparation) reset(ctx context.Context) bool {
	var due []*target
	for _, x := range p.targets {
		if x.resetDue {
			x.begin("reset")
			due = append(due, x)
		}
	}
	if len(due) > 0 {
		ended := inBackground(func() { p.tryUntilReset(ctx, due) })
		for _, x := range due {
			x.await(ctx, ended)
		}
	}
	return p.passed() && p.each(ctx, (*target).afterReset)
}

// tryUntilReset resets GPUs together, and those that are busy again and again. Between the tries the driver is open,
// and other containers are prepared.
func (p *preparation) tryUntilReset(ctx context.Context, due []*target) {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-min(resetReserve, time.Until(deadline)/4)))
		defer cancel()
	}
	for pause := 200 * time.Millisecond; len(due) > 0; pause = min(2*pause, 2*time.Second) {
		due = p.try(ctx, due)
		if len(due) == 0 || !sleep(ctx, pause) {
			return
		}
		var free []*target
		for _, x := range due {
			open := x.awaitUnused(ctx, func() error { return x.checkNotOpen(ctx) })
			switch {
			case ctx.Err() != nil:
				return
			case open != nil:
				x.result = open
			default:
				free = append(free, x)
			}
		}
		due = free
	}
}

// try resets GPUs once, sets their results, and returns those that were busy.
func (p *preparation) try(ctx context.Context, due []*target) (busy []*target) {
	var gpus []Device
	for _, x := range due {
		gpus = append(gpus, x.d)
	}
	var results []ResetResult
	err := p.WithoutDriver(ctx, func() bool {
		results = p.opts.Resetter.Reset(ctx, gpus)
		return true
	})
	for i, x := range due {
		switch {
		case results != nil:
			x.wasTried(ctx, results[i], err)
		case x.result == nil || !errors.Is(err, context.Cause(ctx)): // that it was busy says more than that time is over
			x.result = err
		}
		if err == nil && results[i].Outcome == ResetBusy {
			busy = append(busy, x)
		}
	}
	return busy
}

// wasTried sets the result of a try to reset the GPU. After the try the driver was opened again, or could not be.
func (x *target) wasTried(ctx context.Context, r ResetResult, reopen error) {
	if abandoned, ok := errors.AsType[*AbandonedError](r.Err); ok {
		x.resetting = abandoned.Wait
	}
	switch r.Outcome {
	case ResetDone: // opening the driver is tried again by the next call
		x.resetDone()
		x.result = nil
	case ResetNotSupported, ResetRefused:
		x.opts.State.SetCannotReset(x.d.GPU, plain(r.Err.Error()))
		x.result = x.add("", x.withoutReset(r.Err.Error()))
	case ResetBusy:
		users, unknown := openers(ctx, x.opts.Host, x.d.Nodes)
		switch {
		case unknown != nil:
			x.result = fmt.Errorf("%w; the processes that have it open are unknown: %w", r.Err, unknown)
		case len(users) > 0:
			x.result = inUseError{fmt.Errorf("%w: %s has the GPU open: end it", r.Err, list(users))}
		default:
			x.result = r.Err
		}
	default:
		x.result = errors.Join(r.Err, reopen)
	}
}

// resetDone notes that the GPU was reset, in time or later.
func (x *target) resetDone() {
	x.wasReset = true
	x.setUnusedReset(time.Now())
	x.opts.State.WasReset(x.d.GPU)
}

// afterReset checks a GPU that was reset.
func (x *target) afterReset(ctx context.Context) error {
	if !x.wasReset {
		return nil
	}
	if !x.resetDue { // it was reset before
		x.begin("reset")
	}
	if err := x.add(x.resetNote, x.awaitHealthy(ctx)); err != nil {
		return err
	}
	x.restorePersistence(ctx)
	if x.manual {
		return nil
	}
	return x.step(ctx, step{"memory", x.checkMemory})
}

// awaitReset waits until the reset that was abandoned has ended.
func (x *target) awaitReset() {
	if x.resetting == nil {
		return
	}
	r := x.resetting()
	x.resetting = nil
	if r.Outcome != ResetDone {
		x.opts.Log.Warn("the reset of " + x.d.GPU + " that took too long has failed: " + plain(r.Err.Error()))
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
func (x *target) resetBefore() bool {
	if x.manual || x.needsReset != nil {
		return false
	}
	x.Runner.mu.Lock()
	defer x.Runner.mu.Unlock()
	return time.Since(x.unusedResets[x.d.GPU]) < unusedResetLimit
}

// setUnusedReset sets when the GPU was reset without a container since; zero means that it has to be reset again.
func (x *target) setUnusedReset(at time.Time) {
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
func (x *target) withoutReset(why string) error {
	if x.needsReset != nil {
		return fmt.Errorf("%w, and the GPU cannot be reset: %s", x.needsReset, why)
	}
	if x.rules.Strict {
		return errors.New("the GPU must be reset and cannot be: " + why)
	}
	return skippedError("not reset: " + why)
}

// awaitHealthy waits until the GPU is healthy after its reset.
func (x *target) awaitHealthy(ctx context.Context) error {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := x.withDriver(ctx, func() error { return x.healthy(ctx) })
		if err == nil {
			return nil
		}
		if !sleep(ctx, pause) {
			return fmt.Errorf("after the reset: %w; if this stays, reboot the node", err)
		}
	}
}

// Reset resets a whole GPU for an administrator, whatever its health and what was tried before, and waits until
// healthy, which probes it, returns nil. The caller has made sure that no container uses the GPU or gets it meanwhile.
// Like Run it returns when ctx ends, which should have a deadline.
func (r *Runner) Reset(ctx context.Context, d Device, healthy func(context.Context) error) error {
	p := r.newPreparation(ctx, []Device{d}, Rules{Policy: Reset, Strict: true})
	p.manual, p.targets[0].healthy = true, healthy
	passed := p.lock(ctx) && p.each(ctx, func(x *target, ctx context.Context) error {
		return x.steps(ctx, step{"persistence", x.endPersistence}, step{"reset", x.checkBeforeReset})
	}) && p.reset(ctx)
	_, err := p.finish(ctx, passed)
	if failed, ok := errors.AsType[*Error](err); ok {
		return fmt.Errorf("reset %s: %w", d.UUID, failed.Err) // its text is about a container
	}
	return err
}
