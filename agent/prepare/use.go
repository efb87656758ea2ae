package prepare

import (
	"context"
	"errors"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/proc"
)

// Use is what uses a device: nothing if the text is empty.
type Use struct {
	Text string
	PIDs []int // as far as they are known
}

// FindUse checks a device that no container has. If Run would refuse the device because it is in use, FindUse returns
// what uses it. It changes nothing and does not wait for processes to end. It ignores the device's
// health, and memory that a reset according to the rules would free. While the device is being prepared, FindUse
// waits. An error means that the use is unknown. FindUse returns when ctx ends, which should have a deadline.
func (r *Runner) FindUse(ctx context.Context, d Device, rules Rules) (found Use, err error) {
	p := r.newPreparation(ctx, []Device{d}, task{rules: rules, checkOnly: true})
	passed := p.lock(ctx) && p.each(ctx, func(x *target, ctx context.Context) error {
		return x.steps(ctx,
			step{"sharing", x.checkSharing}, step{"processes", x.checkProcesses}, step{"memory", x.checkMemory})
	})
	_, err = p.finish(ctx, passed)
	if use, ok := errors.AsType[inUseError](err); ok {
		return Use{plain(use.Error()), use.pids}, nil
	}
	return Use{}, err
}

// Users describes the processes on a device: those that belong or may belong to containers, and those of the host.
// Programs that may use the device are left out.
func (r *Runner) Users(ctx context.Context, uuid string, programs []string) (containers, others []string, err error) {
	containers, others, err = r.users(ctx, uuid, programs)
	_, unknown := errors.AsType[skippedError](err)
	if unknown || errors.Is(err, gpu.ErrResetRequired) { // if a process has the GPU open, the reset will fail
		err = nil
	}
	return containers, others, err
}

// Openers describes the processes that have one of the device nodes open and prevent a reset. Those that Reset itself
// makes leave the GPU are left out. An error means that they are unknown.
func (r *Runner) Openers(ctx context.Context, nodes []string) ([]string, error) {
	leave := []string{"nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}
	return openers(ctx, r.opts.Host, nodes, func(p *proc.Process) bool {
		return thisProgram(p) || known(r.opts.Host, p, leave)
	})
}

func (r *Runner) users(ctx context.Context, uuid string, programs []string) (containers, others []string, err error) {
	p := r.newPreparation(ctx, []Device{{UUID: uuid}}, task{rules: Rules{Programs: programs}})
	x := p.targets[0]
	var left []*proc.Process
	err = r.withDriver(ctx, func() error {
		left, containers, err = x.leftovers(ctx)
		return err
	})
	blind := proc.SeesAll(r.opts.Host.Proc()) != nil // then the driver's PIDs are those of another namespace
	for _, p := range left {
		groups, unknown := p.Cgroups()
		if blind || unknown != nil || len(groups) == 0 || groups.InContainer() {
			containers = append(containers, describe(r.opts.Host, p))
		} else {
			others = append(others, describe(r.opts.Host, p))
		}
		p.Close()
	}
	return containers, others, err
}
