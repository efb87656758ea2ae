package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// errNotWhole means that a setting of a MIG device was requested.
var errNotWhole = errors.New("only a whole GPU has settings, not a MIG device")

// RestoreDefaults restores the settings of a whole GPU, given by its UUID, to their defaults: application clocks,
// locked clocks, power limit, compute mode, volatile ECC error counts, and the list of processes in its accounting. If
// exclusive is set, the compute mode becomes EXCLUSIVE_PROCESS, which MPS needs. Settings that the GPU does not
// support are skipped.
//
// It returns the settings that were not at their default, such as "power limit 200 W instead of 350 W", even if there
// is an error. NVML does not report locked clocks, so they are always unlocked and never in the result. Only root may
// change settings; for other users the error wraps [ErrNoPermission]. Snapshots do not wait for this call.
func (s *Session) RestoreDefaults(ctx context.Context, uuid string, exclusive bool) (changed []string, err error) {
	changed, err = withLibrary(ctx, s, "settings of "+uuid, func(l *library, c *call) ([]string, error) {
		dev, err := l.wholeGPU(c, uuid)
		if err != nil {
			return nil, err
		}
		r := settings{library: l, c: c, dev: dev, mode: nvml.COMPUTEMODE_DEFAULT}
		if exclusive {
			r.mode = nvml.COMPUTEMODE_EXCLUSIVE_PROCESS
		}
		err = r.restore()
		return r.changed, err
	})
	return changed, settingError(ctx, "restore the settings of "+uuid, err)
}

// SetPersistence sets the persistence mode of a whole GPU, given by its UUID, and returns whether the mode changed.
// While the mode is on, the persistence daemon or the kernel module keeps the GPU in use, and the GPU cannot be reset.
// If the GPU or the driver does not have the mode, SetPersistence does nothing.
func (s *Session) SetPersistence(ctx context.Context, uuid string, on bool) (changed bool, err error) {
	want := nvml.FEATURE_DISABLED
	if on {
		want = nvml.FEATURE_ENABLED
	}
	changed, err = withLibrary(ctx, s, "persistence mode of "+uuid, func(l *library, c *call) (bool, error) {
		dev, err := l.wholeGPU(c, uuid)
		if err != nil {
			return false, err
		}
		mode, err := invoke(l, c, "nvmlDeviceGetPersistenceMode", dev.GetPersistenceMode)
		if err != nil || mode == want {
			return optional(false, err)
		}
		_, err = invoke(l, c, "nvmlDeviceSetPersistenceMode", noValue(func() nvml.Return {
			return dev.SetPersistenceMode(want)
		}))
		return err == nil, err
	})
	return changed, settingError(ctx, "set the persistence mode of "+uuid, err)
}

func settingError(ctx context.Context, act string, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case hasCode(err, nvml.ERROR_NO_PERMISSION):
		err = fmt.Errorf("%w: %w", ErrNoPermission, err)
	}
	return fmt.Errorf("%s: %w", act, err)
}

func (l *library) wholeGPU(c *call, uuid string) (nvml.Device, error) {
	dev, err := l.deviceByUUID(c, uuid)
	if err != nil {
		return nil, err
	}
	mig, err := optional(invoke(l, c, "nvmlDeviceIsMigDeviceHandle", dev.IsMigDeviceHandle))
	if err != nil {
		return nil, err
	}
	if mig {
		return nil, errNotWhole
	}
	return dev, nil
}

// settings restores the settings of one GPU.
type settings struct {
	*library
	c       *call
	dev     nvml.Device
	mode    nvml.ComputeMode
	changed []string
}

// restore stops at the first error: a GPU that refuses one setting also refuses the others.
func (r *settings) restore() error {
	for _, one := range []func() error{
		r.applicationClocks, r.lockedClocks, r.powerLimit, r.computeMode, r.eccCounts, r.accounting,
	} {
		if err := one(); err != nil {
			return err
		}
	}
	return nil
}

// set calls a function that changes a setting, and adds the change to the result. In a virtual machine some settings
// can be read but not changed; these are skipped.
func (r *settings) set(function string, f func() nvml.Return, format string, args ...any) error {
	_, err := invoke(r.library, r.c, function, noValue(f))
	if err == nil && format != "" {
		r.changed = append(r.changed, fmt.Sprintf(format, args...))
	}
	_, err = optional(struct{}{}, err)
	return err
}

// unsupported reports whether one of the errors means that the GPU or the driver does not support a function. If one
// has another cause, it is returned, with true.
func unsupported(errs ...error) (bool, error) {
	skip := false
	for _, err := range errs {
		if _, other := optional(0, err); other != nil {
			return true, other
		}
		skip = skip || err != nil
	}
	return skip, nil
}

func (r *settings) applicationClocks() error {
	var now, normal [2]uint32
	for i, kind := range []nvml.ClockType{nvml.CLOCK_GRAPHICS, nvml.CLOCK_MEM} {
		var err, errDefault error
		now[i], err = invoke(r.library, r.c, "nvmlDeviceGetApplicationsClock", func() (uint32, nvml.Return) {
			return r.dev.GetApplicationsClock(kind)
		})
		normal[i], errDefault = invoke(r.library, r.c, "nvmlDeviceGetDefaultApplicationsClock",
			func() (uint32, nvml.Return) { return r.dev.GetDefaultApplicationsClock(kind) })
		if skip, err := unsupported(err, errDefault); skip {
			return err
		}
	}
	if now == normal {
		return nil
	}
	return r.set("nvmlDeviceResetApplicationsClocks", r.dev.ResetApplicationsClocks,
		"application clocks %d MHz (graphics) and %d MHz (memory) instead of %d MHz and %d MHz",
		now[0], now[1], normal[0], normal[1])
}

func (r *settings) lockedClocks() error {
	if err := r.set("nvmlDeviceResetGpuLockedClocks", r.dev.ResetGpuLockedClocks, ""); err != nil {
		return err
	}
	return r.set("nvmlDeviceResetMemoryLockedClocks", r.dev.ResetMemoryLockedClocks, "")
}

func (r *settings) powerLimit() error {
	const milli = 1000
	now, err := invoke(r.library, r.c, "nvmlDeviceGetPowerManagementLimit", r.dev.GetPowerManagementLimit)
	normal, errDefault := invoke(r.library, r.c, "nvmlDeviceGetPowerManagementDefaultLimit",
		r.dev.GetPowerManagementDefaultLimit)
	if skip, err := unsupported(err, errDefault); skip || now == normal {
		return err
	}
	return r.set("nvmlDeviceSetPowerManagementLimit",
		func() nvml.Return { return r.dev.SetPowerManagementLimit(normal) },
		"power limit %d W instead of %d W", now/milli, normal/milli)
}

// computeModes are nvidia-smi's names of the compute modes.
var computeModes = map[nvml.ComputeMode]string{
	nvml.COMPUTEMODE_DEFAULT: "DEFAULT", nvml.COMPUTEMODE_EXCLUSIVE_THREAD: "EXCLUSIVE_THREAD",
	nvml.COMPUTEMODE_PROHIBITED: "PROHIBITED", nvml.COMPUTEMODE_EXCLUSIVE_PROCESS: "EXCLUSIVE_PROCESS",
}

func (r *settings) computeMode() error {
	now, err := invoke(r.library, r.c, "nvmlDeviceGetComputeMode", r.dev.GetComputeMode)
	if skip, err := unsupported(err); skip || now == r.mode {
		return err
	}
	return r.set("nvmlDeviceSetComputeMode", func() nvml.Return { return r.dev.SetComputeMode(r.mode) },
		"compute mode %s instead of %s", computeModes[now], computeModes[r.mode])
}

func (r *settings) eccCounts() error {
	var counts [2]uint64
	for i, kind := range []nvml.MemoryErrorType{nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.MEMORY_ERROR_TYPE_UNCORRECTED} {
		var err error
		counts[i], err = invoke(r.library, r.c, "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
			return r.dev.GetTotalEccErrors(kind, nvml.VOLATILE_ECC)
		})
		if skip, err := unsupported(err); skip {
			return err
		}
	}
	if counts == [2]uint64{} {
		return nil
	}
	return r.set("nvmlDeviceClearEccErrorCounts",
		func() nvml.Return { return r.dev.ClearEccErrorCounts(nvml.VOLATILE_ECC) },
		"volatile ECC error counts %d (corrected) and %d (uncorrected)", counts[0], counts[1])
}

func (r *settings) accounting() error {
	mode, err := invoke(r.library, r.c, "nvmlDeviceGetAccountingMode", r.dev.GetAccountingMode)
	if skip, err := unsupported(err); skip || mode == nvml.FEATURE_DISABLED {
		return err
	}
	pids, err := invoke(r.library, r.c, "nvmlDeviceGetAccountingPids", r.dev.GetAccountingPids)
	if skip, err := unsupported(err); skip || len(pids) == 0 {
		return err
	}
	return r.set("nvmlDeviceClearAccountingPids", r.dev.ClearAccountingPids, "accounting of %d processes", len(pids))
}
