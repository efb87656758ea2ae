package nvml

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// Errors of the driver as a whole. Each wraps [gpu.ErrNoDriver]. A driver that does not answer is
// [gpu.ErrNotAnswering].
var (
	// ErrLibraryNotFound means that there is no libnvidia-ml.so.1.
	ErrLibraryNotFound error = driverError("NVIDIA management library not found")
	// ErrLibraryUnusable means that the file is damaged or is not an NVML library for this machine.
	ErrLibraryUnusable error = driverError("not a usable NVIDIA management library")
	// ErrLibraryConflict means that the process has loaded another NVML library before. Until the process ends, it can
	// use no other.
	ErrLibraryConflict error = driverError("the process has loaded another NVIDIA management library")
	// ErrDriverNotLoaded means that the kernel module is not loaded.
	ErrDriverNotLoaded error = driverError("NVIDIA kernel module not loaded")
	// ErrNoControlNode means that the kernel module is loaded, and the library cannot open its device node all the same.
	ErrNoControlNode error = driverError(
		"the NVIDIA kernel module is loaded, but its device node nvidiactl is missing or of another device")
	// ErrVersionMismatch means that the library and the kernel module have different versions.
	ErrVersionMismatch error = driverError("NVIDIA library and kernel module have different versions")
	// ErrNoPermission means that the process may not use the driver, or may not change a setting of a GPU.
	ErrNoPermission error = driverError("no permission to use the NVIDIA driver")
	// ErrReleased means that [Session.Release] has closed the driver, and that it is not opened again yet.
	ErrReleased error = driverError("the NVIDIA driver is temporarily released")
	// ErrDriverFailed means that the driver returned any other error.
	ErrDriverFailed error = driverError("the NVIDIA driver failed")
)

// driverError wraps gpu.ErrNoDriver without repeating its text.
type driverError string

func (e driverError) Error() string { return string(e) }

func (e driverError) Unwrap() error { return gpu.ErrNoDriver }

// functionError means that an NVML function returned an error code.
type functionError struct {
	function string
	code     nvml.Return
	text     string // NVML's text, copied at once since the library owns it
}

func (e *functionError) Error() string { return e.function + ": " + e.text }

// Is makes errors.Is find gpu.ErrResetRequired if NVML returned the code for that.
func (e *functionError) Is(target error) bool {
	return target == gpu.ErrResetRequired && e.code == nvml.ERROR_RESET_REQUIRED
}

// hasCode reports whether err is that of an NVML function which returned one of the codes.
func hasCode(err error, codes ...nvml.Return) bool {
	e, ok := errors.AsType[*functionError](err)
	return ok && slices.Contains(codes, e.code)
}

// optional returns the zero value and no error if the error means that the GPU or the driver does not support the
// function.
func optional[T any](v T, err error) (T, error) {
	if isNotSupported(err) {
		return v, nil
	}
	return v, err
}

// isNotSupported reports whether err means that the GPU or the driver does not support the function.
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
