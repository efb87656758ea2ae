package nvml

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// SetExclusive lets one process at a time use a GPU (the compute mode EXCLUSIVE_PROCESS) or any number (DEFAULT). It is
// named by its UUID. The mode holds until the driver gives the GPU up. An error wraps [ErrNoPermission] if the process
// may not change the mode, which only root may, and [ErrNoAnswer] if the driver does not answer in time.
func (l *Library) SetExclusive(ctx context.Context, uuid string, exclusive bool) error {
	if l.closed.Load() {
		return errClosed
	}
	mode := nvml.COMPUTEMODE_DEFAULT
	if exclusive {
		mode = nvml.COMPUTEMODE_EXCLUSIVE_PROCESS
	}
	waiting, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	var answer error // of a call that was given up it may come later, and is not looked at
	err := l.driver.tasks.do(waiting, "compute mode of "+uuid, func(t *task) { answer = l.driver.setComputeMode(t, uuid, mode) }, nil)
	switch {
	case err != nil && ctx.Err() != nil:
		err = context.Cause(ctx)
	case err == nil && hasCode(answer, nvml.ERROR_NO_PERMISSION):
		err = fmt.Errorf("%w: %w", ErrNoPermission, answer)
	case err == nil:
		err = answer
	}
	if err != nil {
		return fmt.Errorf("set the compute mode of %s: %w", uuid, err)
	}
	return nil
}

func (d *driver) setComputeMode(t *task, uuid string, mode nvml.ComputeMode) error {
	dev, err := ask(d, t, "nvmlDeviceGetHandleByUUID", func() (nvml.Device, nvml.Return) {
		return d.api.DeviceGetHandleByUUID(uuid)
	})
	if err != nil {
		return err
	}
	_, err = ask(d, t, "nvmlDeviceSetComputeMode", noValue(func() nvml.Return { return dev.SetComputeMode(mode) }))
	return err
}
