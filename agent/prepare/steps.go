package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"gpu-cdi-plugin/gpu"
)

// check runs the steps that change nothing.
func (x *target) check(ctx context.Context) error {
	return x.steps(ctx,
		step{"sharing", x.checkSharing},
		step{"health", x.checkHealth},
		step{"processes", x.checkProcesses},
		step{"memory", x.checkMemory},
	)
}

// clean restores the settings of the GPU and makes its reset possible.
func (x *target) clean(ctx context.Context) error {
	return x.steps(ctx,
		step{"settings", x.restoreSettings},
		step{"persistence", x.endPersistence},
		step{"reset", x.checkBeforeReset},
	)
}

// runProgram runs the administrator's program. Meanwhile no GPU is reset: the program may run nvidia-smi.
func (x *target) runProgram(ctx context.Context) error {
	if x.task.rules.Policy == None {
		return x.steps(ctx, step{"sharing", x.checkSharing}, step{"exec", x.exec})
	}
	return x.steps(ctx, step{"exec", x.exec})
}

// step is a named step of a preparation.
type step struct {
	name string
	do   stepFunc
}

// stepFunc runs a step and returns what it found or did.
type stepFunc = func(context.Context) (note string, err error)

// errNotDue means that the policy does not include the step, which is then not recorded.
var errNotDue = errors.New("not a step of the policy")

// skippedError means that a step is not run for a device.
type skippedError string

func (s skippedError) Error() string { return string(s) }

// unableError means that a step should be run and cannot be, although the device is given to the container.
type unableError struct{ skippedError }

func (e unableError) Unwrap() error { return e.skippedError }

func unable(format string, args ...any) error {
	return unableError{skippedError(fmt.Sprintf(format, args...))}
}

// steps runs steps and records them until one fails.
func (x *target) steps(ctx context.Context, steps ...step) error {
	for _, s := range steps {
		if err := x.step(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// step runs and records a step. It waits while the driver is closed. While the device is in use, it repeats the step
// for a time: an ended container may still be on the device.
func (x *target) step(ctx context.Context, s step) error {
	x.record.begin("wait")
	note, begun := "", false
	err := x.awaitUnused(ctx, func() error {
		return x.runner.withDriver(ctx, func() (err error) {
			if !begun {
				x.record.begin(s.name)
				begun = true
			}
			note, err = s.do(ctx)
			return err
		})
	})
	return x.record.add(note, x.unlessReset(err))
}

// unlessReset skips a step that the driver refuses until the GPU is reset, if this preparation resets it. That is
// safe: a process that the step would have found makes the reset fail.
func (x *target) unlessReset(err error) error {
	if !errors.Is(err, gpu.ErrResetRequired) || !x.willReset() || x.wasReset || x.task.checkOnly {
		return err
	}
	x.needsReset = cmp.Or(x.needsReset, err)
	return skippedError(err.Error())
}

// awaitUnused repeats a check for Options.AwaitUnused while it returns inUseError.
func (x *target) awaitUnused(ctx context.Context, check func() error) error {
	end := time.Now().Add(x.runner.opts.AwaitUnused)
	var inUse error
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err := check()
		if inUse != nil && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
			return inUse // inUse says more than the end of the time limit
		}
		if !InUse(err) || x.task.checkOnly || time.Now().Add(pause).After(end) || !sleep(ctx, pause) {
			return err
		}
		inUse = err
	}
}

// sleep reports whether the time has passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

func (x *target) restoreSettings(ctx context.Context) (string, error) {
	if why := x.whyNotAlone(); why != "" {
		return "", skippedError(why)
	}
	changed, err := x.runner.opts.Driver.RestoreDefaults(ctx, x.d.GPU, x.d.Exclusive)
	return strings.Join(changed, "; "), err
}

// whyNotAlone returns why the container would share the GPU with others, or "".
func (x *target) whyNotAlone() string {
	switch {
	case !x.d.whole():
		return "the device is a part of a GPU"
	case x.shared != "":
		return "the device is shared: " + x.shared
	}
	return ""
}
