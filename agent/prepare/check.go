package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"gpu-cdi-plugin/internal/proc"
)

func (x *target) checkSharing(context.Context) (string, error) {
	x.shared = x.runner.opts.State.Shared(x.d.UUID)
	if x.shared == "" && x.d.Replica {
		x.shared = "the container has a replica from before a reload"
	}
	return x.shared, nil
}

// checkHealth passes if the device is healthy, or if a due reset may heal it; the device is probed again after the
// reset.
func (x *target) checkHealth(ctx context.Context) (string, error) {
	err := x.runner.opts.State.Healthy(ctx, x.d.UUID)
	if _, ok := errors.AsType[*NeedsResetError](err); ok && x.willReset() {
		x.needsReset = err
		return err.Error(), nil
	}
	return "", err
}

// whyNotSeen returns why the processes on the device cannot be checked, or "".
func (x *target) whyNotSeen() string {
	if x.shared != "" {
		return "the device is shared: " + x.shared
	}
	if err := proc.SeesAll(x.runner.opts.Host.Proc()); err != nil {
		return "other processes cannot be seen: " + err.Error()
	}
	return ""
}

// checkProcesses passes if no process uses the device except known programs and a desktop.
func (x *target) checkProcesses(ctx context.Context) (string, error) {
	if why := x.whyNotSeen(); why != "" {
		return "", skippedError(why)
	}
	left, names, err := x.leftovers(ctx)
	var pids []int
	for _, p := range left {
		names, pids = append(names, describe(x.runner.opts.Host, p)), append(pids, p.PID)
		p.Close()
	}
	if err == nil && len(names) > 0 {
		err = inUseError{errors.New(list(names) + " still uses it: end it, or wait until it has ended; " +
			"if it may stay, add its program to those that may use the device"), pids}
	}
	return "", err
}

// leftovers returns the processes that must not be on the device: those that can be opened, and the names of the
// others. The caller closes the former.
func (x *target) leftovers(ctx context.Context) (left []*proc.Process, others []string, err error) {
	use, err := x.runner.opts.Driver.Use(ctx, x.d.UUID)
	if err != nil {
		return nil, nil, err
	}
	h := x.runner.opts.Host
	for _, one := range use.Processes {
		p, err := proc.Open(h.Proc(), one.PID)
		switch {
		case err != nil: // the driver has not noticed the process's end yet, or reports a wrong PID
			others = append(others, fmt.Sprintf("process %d (not in %s)", one.PID, h.Proc()))
		case one.Graphics && !one.Compute && !one.MPS && isDesktop(h, p), known(h, p, x.task.rules.Programs):
			x.excused[one.PID] = true
			p.Close()
		default:
			left = append(left, p)
		}
	}
	if use.ProcessesUnknown && len(left)+len(others) == 0 {
		err = unable("the driver does not report the processes on the device")
	}
	return left, others, err
}

// checkMemory passes if only known programs use memory and other use is within the tolerance, or if a reset will free
// the memory. If the processes cannot be seen, the memory may be that of a desktop or a monitoring agent: policy Check
// then passes.
func (x *target) checkMemory(ctx context.Context) (string, error) {
	switch {
	case x.shared != "":
		return "", skippedError("the device is shared: " + x.shared)
	case x.d.SharesMemory:
		return "", skippedError("the device shares its memory with other MIG devices")
	case x.task.rules.Policy == Check && x.whyNotSeen() != "":
		return "", skippedError(x.whyNotSeen())
	}
	used, unknown, err := x.memoryInUse(ctx)
	switch {
	case err != nil || used == 0:
		return "", err
	case used <= x.task.rules.MemoryTolerance:
	case unknown != 0:
		return "", unable("the driver does not report the memory of process %d", unknown)
	case x.willReset() && !x.wasReset:
		x.needsReset = cmp.Or(x.needsReset, fmt.Errorf("%d MiB are in use without a process", used>>20))
	default:
		return "", x.memoryError(used)
	}
	return fmt.Sprintf("%d MiB in use", used>>20), nil
}

// memoryInUse returns the memory in use on the device, in bytes, without the memory of the processes in x.excused,
// which may use the device. It also returns the PID of such a process whose memory the driver does not report, or 0.
func (x *target) memoryInUse(ctx context.Context) (used uint64, unknown int, err error) {
	use, err := x.runner.opts.Driver.Use(ctx, x.d.UUID)
	if err == nil && use.MemoryUnknown {
		err = unable("the driver does not report the memory in use")
	}
	used = use.MemoryUsed
	for _, p := range use.Processes {
		if x.excused[p.PID] {
			used -= min(used, p.MemoryBytes)
			if p.MemoryBytes == 0 {
				unknown = p.PID
			}
		}
	}
	return used, unknown, err
}

// memoryError reports memory, in bytes, that must not be in use, and what to do about it.
func (x *target) memoryError(used uint64) error {
	if x.wasReset {
		return inUseError{fmt.Errorf(
			"%d MiB of GPU memory are in use although the GPU was reset: find the process with nvidia-smi", used>>20), nil}
	}
	do := "reset the GPU"
	if x.whyNotSeen() != "" {
		do += ", or run this program in the host's PID namespace to see the processes"
	}
	return inUseError{fmt.Errorf("%d MiB are in use without a process, more than %d MiB: %s",
		used>>20, x.task.rules.MemoryTolerance>>20, do), nil}
}

// inUseError means that something uses the device. The use may end by itself.
type inUseError struct {
	error

	pids []int // the processes that use it, as far as they are known
}

// InUse reports whether an error of a Runner means that something uses the device and must be ended; the error names
// it.
func InUse(err error) bool {
	_, is := errors.AsType[inUseError](err)
	return is
}
