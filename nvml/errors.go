package nvml

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// What can be wrong with the driver as a whole. Each wraps [gpu.ErrNoDriver]. A driver that does not answer is
// [gpu.ErrNotAnswering].
var (
	// ErrLibraryNotFound reports that there is no libnvidia-ml.so.1.
	ErrLibraryNotFound error = driverError("NVIDIA management library not found")
	// ErrLibraryUnusable reports that the file is no NVML library for this machine, or a damaged one.
	ErrLibraryUnusable error = driverError("not a usable NVIDIA management library")
	// ErrLibraryConflict reports that the process has loaded another NVML library before. It can use only one until it
	// ends.
	ErrLibraryConflict error = driverError("the process has loaded another NVIDIA management library")
	// ErrDriverNotLoaded reports that the kernel module is not loaded.
	ErrDriverNotLoaded error = driverError("NVIDIA kernel module not loaded")
	// ErrVersionMismatch reports that the library and the kernel module are of different versions.
	ErrVersionMismatch error = driverError("NVIDIA library and kernel module have different versions")
	// ErrNoPermission reports that the process may not use the driver, or may not change a setting of a GPU.
	ErrNoPermission error = driverError("no permission to use the NVIDIA driver")
	// ErrReleased reports that the session has released the driver; see [Session.Release].
	ErrReleased error = driverError("the NVIDIA driver is released for now")
	// ErrDriverFailed reports that the driver answered with any other error.
	ErrDriverFailed error = driverError("the NVIDIA driver failed")
)

// driverError is an error that wraps gpu.ErrNoDriver without repeating its text.
type driverError string

// Error is the text without that of gpu.ErrNoDriver.
func (e driverError) Error() string { return string(e) }

// Unwrap returns gpu.ErrNoDriver.
func (e driverError) Unwrap() error { return gpu.ErrNoDriver }

// functionError is the error that an NVML function returned.
type functionError struct {
	function string
	code     nvml.Return
	text     string // NVML's own, taken at once since it belongs to the library
}

// Error names the function.
func (e *functionError) Error() string { return e.function + ": " + e.text }

// Is reports whether the error is gpu.ErrResetRequired.
func (e *functionError) Is(target error) bool {
	return target == gpu.ErrResetRequired && e.code == nvml.ERROR_RESET_REQUIRED
}

// hasCode reports whether err is one of the codes, returned by an NVML function.
func hasCode(err error, codes ...nvml.Return) bool {
	e, ok := errors.AsType[*functionError](err)
	return ok && slices.Contains(codes, e.code)
}

// optional drops the error that the GPU or the driver does not support the function. The value is then the zero value.
func optional[T any](v T, err error) (T, error) {
	if isNotSupported(err) {
		return v, nil
	}
	return v, err
}

// isNotSupported reports whether err is that the GPU or the driver does not support the function.
func isNotSupported(err error) bool {
	return hasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND)
}

// classify wraps the error of a call about the driver as a whole.
func classify(err error) error {
	timeout, isTimeout := errors.AsType[*timeoutError](err)
	switch {
	case err == nil:
		return nil
	case isTimeout:
		return fmt.Errorf("%w (%s has not returned)", gpu.ErrNotAnswering, timeout.function)
	case hasCode(err, nvml.ERROR_DRIVER_NOT_LOADED):
		return fmt.Errorf("%w: %w", ErrDriverNotLoaded, err)
	case hasCode(err, nvml.ERROR_NO_PERMISSION):
		return fmt.Errorf("%w: %w", ErrNoPermission, err)
	default:
		return fmt.Errorf("%w: %w", ErrDriverFailed, err)
	}
}
