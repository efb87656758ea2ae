package prepare

import (
	"context"
	"errors"
	"fmt"
)

// Reset resets a whole GPU for an administrator, whatever its health and what was tried before, and waits until
// healthy, which probes it, returns nil. The caller has made sure that no container uses the GPU or gets it meanwhile.
// Like Run it returns when ctx ends, which should have a deadline.
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
