package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"
)

// Resetter resets GPUs.
type Resetter interface {
	// Ready returns why no reset can be tried now, or nil. It is called before the driver is released.
	Ready() error
	// Reset resets whole GPUs, and returns a result for each. No process of this host that is known uses the GPUs.
	// Calls do not overlap. At the deadline of ctx, running resets are abandoned and their errors are
	// *[AbandonedError]. If ctx is canceled before that, Reset still waits for them.
	Reset(ctx context.Context, gpus []Device) []ResetResult
}

// ResetResult is the result of a GPU's reset. Unless the Outcome is ResetDone, Err says why.
type ResetResult struct {
	Outcome Outcome
	Err     error
}

// Outcome is how a reset ended.
type Outcome int

// The outcomes of a reset.
const (
	ResetFailed       Outcome = iota
	ResetDone                 // the GPU was reset
	ResetBusy                 // a process has the GPU open, or the GPU is still busy: a later attempt may succeed
	ResetNotSupported         // the GPU or the machine has no reset, like most virtual machines
	ResetRefused              // NVSwitches, or its use as the primary GPU, do not allow a reset
)

// AbandonedError means that a reset did not end in time. The reset continues, even if this process ends, and the GPU
// must not be used until the reset has ended.
type AbandonedError struct {
	// Wait waits until the reset has ended. If ctx ends before that, the error of the result is the same
	// *AbandonedError.
	Wait func(ctx context.Context) ResetResult
	// Since is when the reset began.
	Since time.Time
}

func (e *AbandonedError) Error() string {
	return fmt.Sprintf("the reset that began at %s has not ended; containers do not get the GPU before it has ended",
		timeText(e.Since))
}

// timeText formats a time for errors.
func timeText(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Times for what is done before, during and after a reset.
const (
	// hungAfter is how long the driver may be closed for a reset. A reset that takes longer counts as hung: it goes on,
	// but the driver is opened again for the other GPUs. Of the 25 s that the preparation of a container has, that
	// leaves others 10 s for the opening and for their steps. A reset takes seconds, or up to a minute with all GPUs of
	// a large machine.
	hungAfter = 15 * time.Second
	// waitLimit is how long a reset may wait for the driver, during another reset or a call that hangs. Calls that come
	// later wait for the reset meanwhile.
	waitLimit = hungAfter + 5*time.Second
	// resetReserve is the part of the deadline that is left for the probes after a reset.
	resetReserve = 2 * time.Second
	// The time limits for reopening the driver, and for restoring persistence mode, which waits for the resets of
	// other GPUs. Both are done even after the deadline.
	reopenLimit      = 10 * time.Second
	persistenceLimit = 30 * time.Second
)

// whyNotReset returns why it is known that the GPU cannot be reset, or "".
func (x *target) whyNotReset() string {
	if why := x.whyNotAlone(); why != "" {
		return why
	}
	if x.runner.opts.Resetter == nil {
		return "this program has no way to reset GPUs"
	}
	if why := x.runner.opts.State.CannotReset(x.d.GPU); why != "" && !x.task.manual {
		return why + " (found by an earlier reset)"
	}
	return ""
}

// willReset reports whether the GPU will be reset, or was reset already.
func (x *target) willReset() bool { return x.task.rules.Policy == Reset && x.whyNotReset() == "" }

// endPersistence switches persistence mode off before a reset, since with this mode the GPU stays in use.
func (x *target) endPersistence(ctx context.Context) (string, error) {
	if !x.willReset() || x.resetBefore() {
		return "", errNotDue
	}
	changed, err := x.runner.opts.Driver.SetPersistence(ctx, x.d.GPU, false)
	if err != nil { // if the mode matters, the reset will fail
		return "", skippedError("persistence mode cannot be switched off: " + err.Error())
	}
	x.persistent = changed
	return "", nil
}

// restorePersistence switches persistence mode on again if endPersistence switched it off, even after the deadline.
func (x *target) restorePersistence(ctx context.Context) {
	if !x.persistent {
		return
	}
	x.persistent = false
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), persistenceLimit)
	defer cancel()
	err := x.runner.withDriver(ctx, func() error {
		_, err := x.runner.opts.Driver.SetPersistence(ctx, x.d.GPU, true)
		return err
	})
	if err != nil { // the record may have been returned already
		x.runner.opts.Log.Warn("the persistence mode of " + x.d.GPU + " was switched off for a reset and cannot be " +
			"switched on again (nvidia-smi -i " + x.d.GPU + " -pm 1 does that): " + plain(err.Error()))
	}
}

// checkBeforeReset decides whether to reset the GPU. If so, it checks that nothing prevents the reset, before the
// driver is closed for all GPUs. It records the step "reset" only if there is no reset.
func (x *target) checkBeforeReset(ctx context.Context) (string, error) {
	if x.task.rules.Policy != Reset {
		return "", errNotDue
	}
	if why := x.whyNotReset(); why != "" {
		return "", x.withoutReset(why)
	}
	if x.resetBefore() {
		x.wasReset, x.resetNote = true, "it was already reset, and no container has had it since"
		x.setUnusedReset(time.Time{}) // if a fault is found from now on, the GPU is reset again
		return "", errNotDue
	}
	if err := x.runner.opts.Resetter.Ready(); err != nil {
		return "", err
	}
	x.resetDue = true
	return "", cmp.Or(x.checkNotOpen(ctx), errNotDue)
}

// checkNotOpen returns an error if a process other than this one has the GPU open.
func (x *target) checkNotOpen(ctx context.Context) error {
	users, _ := openers(ctx, x.runner.opts.Host, x.d.Nodes, thisProgram) // if unknown, the reset fails because of them
	if len(users) == 0 {
		return nil
	}
	return inUseError{fmt.Errorf("%s has the GPU open, so it cannot be reset: end it", list(users)), nil}
}

// reset resets the GPUs that must be reset. It reports whether all of them are then healthy, or can be used without a
// reset.
func (p *preparation) reset(ctx context.Context) bool {
	var due []*target
	for _, x := range p.targets {
		if x.resetDue {
			x.record.begin("reset")
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

// tryUntilReset resets GPUs together, and tries again for GPUs that are busy. Between attempts the driver is open, and
// other containers are prepared.
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

// try resets GPUs once, sets their results, and returns those that are busy.
func (p *preparation) try(ctx context.Context, due []*target) (busy []*target) {
	var gpus []Device
	for _, x := range due {
		gpus = append(gpus, x.d)
	}
	results, err := p.runner.resetTogether(ctx, gpus)
	for i, x := range due {
		switch {
		case results != nil:
			x.wasTried(ctx, results[i], err)
		case x.result == nil || !errors.Is(err, context.Cause(ctx)): // the earlier result says more than a timeout
			x.result = err
		}
		if err == nil && results[i].Outcome == ResetBusy {
			busy = append(busy, x)
		}
		if p.task.manual && x.hungReset != nil { // the kubelet tries again, but an administrator would have to
			x.awaitHungReset(ctx)
		}
	}
	return busy
}

// awaitHungReset waits until the hung reset has ended, or until ctx ends. Then it opens the driver again: it was opened
// during the reset, and could show the GPU as lost.
func (x *target) awaitHungReset(ctx context.Context) {
	late := x.hungReset.Wait(ctx)
	if _, hung := errors.AsType[*AbandonedError](late.Err); hung {
		return
	}
	x.hungReset = nil
	reopen := x.runner.WithoutDriver(ctx, "it is opened again after a reset", func() bool { return true })
	x.wasTried(ctx, late, reopen)
}

// resetTogether resets GPUs while the driver is closed, for at most hungAfter. If there are no results, no reset was
// tried. Otherwise the error is that of reopening the driver.
func (r *Runner) resetTogether(ctx context.Context, gpus []Device) (results []ResetResult, err error) {
	waiting, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	if err := r.hold(waiting, wholeDriver); err != nil {
		return nil, err
	}
	defer r.driver.Release(wholeDriver)
	if err := r.opts.Resetter.Ready(); err != nil { // the reset that was waited for may have hung
		return nil, err
	}
	closed, cancel := context.WithTimeout(ctx, hungAfter)
	defer cancel()
	err = r.whileClosed(closed, "it is closed for a reset of "+names(gpus), func() bool {
		results = r.opts.Resetter.Reset(closed, gpus)
		return true
	})
	return results, err
}

// names names GPUs by their UUIDs and PCI addresses.
func names(gpus []Device) string {
	var texts []string
	for i := range gpus {
		texts = append(texts, gpus[i].GPU+" ("+gpus[i].PCIBusID+")")
	}
	return list(texts)
}

// wasTried sets the result of an attempt to reset the GPU. `reopen` is the error of reopening the driver after it.
func (x *target) wasTried(ctx context.Context, r ResetResult, reopen error) {
	if abandoned, ok := errors.AsType[*AbandonedError](r.Err); ok {
		x.setHung(abandoned)
	}
	switch r.Outcome {
	case ResetDone: // the next call tries to open the driver again
		x.resetDone()
		x.result = nil
	case ResetNotSupported, ResetRefused:
		x.runner.opts.State.SetCannotReset(x.d.GPU, plain(r.Err.Error()))
		x.result = x.record.add("", x.withoutReset(r.Err.Error()))
	case ResetBusy:
		users, unknown := openers(ctx, x.runner.opts.Host, x.d.Nodes, skipNone)
		switch {
		case unknown != nil:
			x.result = fmt.Errorf("%w; the processes that have it open are unknown: %w", r.Err, unknown)
		case len(users) > 0:
			x.result = inUseError{fmt.Errorf("%w: %s has the GPU open: end it", r.Err, list(users)), nil}
		default:
			x.result = r.Err
		}
	default:
		x.result = errors.Join(r.Err, reopen)
	}
}

// setHung records that the reset of the GPU counts as hung, so that new containers get other GPUs.
func (x *target) setHung(reset *AbandonedError) {
	x.runner.opts.State.HoldForReset(x.d.GPU, "held for a reset that has not ended, since "+timeText(reset.Since))
	x.hungReset = reset
	x.runner.mu.Lock()
	defer x.runner.mu.Unlock()
	r := x.runner.running[x.d.UUID]
	r.err = reset
	close(r.hung)
}

// resetDone records that the GPU was reset, even if that was too late for the container.
func (x *target) resetDone() {
	x.wasReset = true
	x.setUnusedReset(time.Now())
	x.runner.opts.State.WasReset(x.d.GPU)
}

// afterReset checks a GPU after its reset.
func (x *target) afterReset(ctx context.Context) error {
	if !x.wasReset {
		return nil
	}
	if !x.resetDue { // the GPU was reset earlier
		x.record.begin("reset")
	}
	if err := x.record.add(x.resetNote, x.awaitHealthy(ctx)); err != nil {
		return err
	}
	x.restorePersistence(ctx)
	if x.task.manual {
		return nil
	}
	return x.step(ctx, step{"memory", x.checkMemory})
}

// awaitReset waits until the hung reset has ended, also after ctx has ended.
func (x *target) awaitReset(ctx context.Context) {
	if x.hungReset == nil {
		return
	}
	r := x.hungReset.Wait(context.WithoutCancel(ctx))
	x.hungReset = nil
	if r.Outcome != ResetDone {
		x.runner.opts.Log.Warn("the reset of " + x.d.GPU + " that took too long has failed: " + plain(r.Err.Error()))
		return
	}
	x.resetDone()
	x.runner.opts.Log.Info(x.d.GPU + " was reset, though too late for the container or command that waited for it")
}

// unusedResetLimit is how long a reset counts after which no container got the GPU. The kubelet tries to start a
// container again within 5 minutes.
const unusedResetLimit = 6 * time.Minute

// resetBefore reports whether the GPU was reset already by an earlier attempt to start the container, which failed.
// Otherwise, if a reset takes longer than the kubelet waits, the GPU would be reset again and again.
func (x *target) resetBefore() bool {
	if x.task.manual || x.needsReset != nil {
		return false
	}
	x.runner.mu.Lock()
	defer x.runner.mu.Unlock()
	return time.Since(x.runner.unusedResets[x.d.GPU]) < unusedResetLimit
}

// setUnusedReset records when the GPU was reset, if no container has got it since. The zero time means that it must be
// reset again.
func (x *target) setUnusedReset(at time.Time) {
	x.runner.mu.Lock()
	defer x.runner.mu.Unlock()
	if at.IsZero() {
		delete(x.runner.unusedResets, x.d.GPU)
		return
	}
	x.runner.unusedResets[x.d.GPU] = at
}

// withoutReset returns the result if the GPU cannot be reset. The step is skipped. It fails if Rules.Strict is set, or
// if only a reset can make the device healthy.
func (x *target) withoutReset(why string) error {
	if x.needsReset != nil {
		return fmt.Errorf("%w, and the GPU cannot be reset: %s", x.needsReset, why)
	}
	if x.task.rules.Strict {
		return errors.New("the GPU must be reset and cannot be: " + why)
	}
	if x.whyNotAlone() != "" {
		return skippedError("not reset: " + why)
	}
	return unable("not reset: %s", why)
}

// awaitHealthy waits until the GPU is healthy after its reset.
func (x *target) awaitHealthy(ctx context.Context) error {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := x.runner.withDriver(ctx, func() error { return x.task.healthy(ctx, x.d.UUID) })
		if err == nil {
			return nil
		}
		if !sleep(ctx, pause) {
			return fmt.Errorf("after the reset: %w; if this stays, reboot the node", err)
		}
	}
}

// Reset resets a whole GPU for an administrator, whatever its health and earlier attempts. Then it waits until the
// function `healthy`, which probes the GPU with a UUID, returns nil. The caller must make sure that no container uses
// the GPU or gets it meanwhile. Like Run, Reset returns when ctx ends, which should have a deadline. An
// *[AbandonedError] means that the reset goes on, and that the GPU is held until it has ended.
func (r *Runner) Reset(
	ctx context.Context, d Device, healthy func(ctx context.Context, uuid string) error,
) error {
	p := r.newPreparation(ctx, []Device{d}, task{
		rules: Rules{Policy: Reset, Strict: true}, healthy: healthy, manual: true,
	})
	passed := p.lock(ctx) && p.each(ctx, func(x *target, ctx context.Context) error {
		return x.steps(ctx, step{"persistence", x.endPersistence}, step{"reset", x.checkBeforeReset})
	}) && p.reset(ctx)
	_, err := p.finish(ctx, passed)
	if failed, ok := errors.AsType[*Error](err); ok {
		return fmt.Errorf("reset %s: %w", d.UUID, failed.Err) // its own text is about a container
	}
	return err
}
