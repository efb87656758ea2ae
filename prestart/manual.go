package prestart

import (
	"context"
	"errors"
	"fmt"
)

// Reset resets a whole GPU for an administrator, whatever its health and what was tried before, and waits until healthy,
// which probes it, returns nil. The caller has made sure that no container uses the GPU or gets it meanwhile. Like Run
// it returns when ctx ends, which should have a deadline.
func (r *Runner) Reset(ctx context.Context, d Device, healthy func(context.Context) error) error {
	x := &run{Runner: r, d: d, rules: Rules{Policy: Reset, Strict: true}, manual: true, healthy: healthy}
	_, err := r.perform(ctx, x, func(ctx context.Context) error {
		err := x.gate.use(ctx, func() error { return x.step(ctx, "persistence", x.endPersistence) })
		if err == nil {
			err = x.step(ctx, "reset", x.reset)
		}
		x.restorePersistence(ctx)
		return err
	})
	if failed, ok := errors.AsType[*Error](err); ok {
		return fmt.Errorf("reset %s: %w", d.UUID, failed.Err) // its text is about a container
	}
	return err
}

// Users returns the processes on a device, a text for each: those of containers, or of which that cannot be ruled out,
// and those of the host. Programs that may use the device are left out.
func (r *Runner) Users(ctx context.Context, uuid string, programs []string) (containers, others []string, err error) {
	x := &run{Runner: r, d: Device{UUID: uuid}, rules: Rules{Programs: programs}, excused: map[int]bool{}}
	var left []*process
	err = r.gate.use(ctx, func() error {
		left, containers, err = x.leftovers(ctx)
		return err
	})
	blind := seesAll(r.opts.Host) != nil // a PID of the driver is then another process here
	for _, p := range left {
		groups, err := p.cgroups()
		if blind || err != nil || len(groups) == 0 || groups.inContainer() {
			containers = append(containers, p.String())
		} else {
			others = append(others, p.String())
		}
		p.close()
	}
	return containers, others, err
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
