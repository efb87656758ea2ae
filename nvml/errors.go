package nvml

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/internal/exit"
)

// What can be wrong with the driver as a whole. Errors that wrap one of these carry an exit status (exit.CodeOf) and
// say what to do (exit.HintOf).
var (
	// ErrLibraryNotFound is that there is no libnvidia-ml.so.1.
	ErrLibraryNotFound = errors.New("NVIDIA management library not found")
	// ErrLibraryUnusable is that the file is no NVML library for this machine, or a damaged one.
	ErrLibraryUnusable = errors.New("not a usable NVIDIA management library")
	// ErrLibraryConflict is that the process has loaded another NVML library before.
	ErrLibraryConflict = errors.New("the process has loaded another NVIDIA management library")
	// ErrDriverNotLoaded is that the kernel module is not loaded.
	ErrDriverNotLoaded = errors.New("NVIDIA kernel module not loaded")
	// ErrVersionMismatch is that the library and the kernel module are of different versions.
	ErrVersionMismatch = errors.New("NVIDIA library and kernel module have different versions")
	// ErrNoPermission is that the process may not talk to the driver.
	ErrNoPermission = errors.New("no permission to use the NVIDIA driver")
	// ErrNoAnswer is that a call to the driver has not returned in time.
	ErrNoAnswer = errors.New("does not answer")
	// ErrNoDevices is that the driver works and has no GPU.
	ErrNoDevices = errors.New("the NVIDIA driver has no GPU")
)

const (
	hintNotFound = "install the NVIDIA driver, or name its root with --driver-root or the library with --nvml-library; " +
		"gpu-cdi-plugin cdi generate --explain says where it was looked for"
	hintUnusable = "name the libnvidia-ml.so.1 of the installed driver, built for this machine, " +
		"or install the driver again if the file is damaged"
	hintConflict     = "start the process again; a process can use one NVIDIA driver library only"
	hintNotLoaded    = "load the kernel module (modprobe nvidia); if that fails, the kernel log says why (dmesg)"
	hintMismatch     = "reboot, or stop everything that uses the GPUs and reload the kernel modules"
	hintNoPermission = "run as root, or as a user who may open /dev/nvidiactl and /dev/nvidia*; " +
		"in a container the nodes must be given to it"
	hintNoAnswer  = "see the kernel log (dmesg) for messages of NVRM; a GPU that hangs needs a reset or a reboot"
	hintNoDevices = "see whether lspci -d 10de: lists a GPU, and the kernel log (dmesg) for messages of NVRM"
	hintLog       = "see the kernel log (dmesg) for messages of NVRM"
)

// noDriver gives err the exit status of a driver that cannot be used.
func noDriver(hint string, err error) error { return exit.With(exit.NoDriver, hint, err) }

// callError is an NVML call that was answered with an error.
type callError struct {
	call  string
	code  nvml.Return
	words string // NVML's own; taken at once, because they come out of the library
}

func newCallError(call string, code nvml.Return) *callError {
	return &callError{call: call, code: code, words: code.Error()}
}

func (e *callError) Error() string { return e.call + ": " + e.words }

// hasCode reports whether err is a call that was answered with one of the codes.
func hasCode(err error, codes ...nvml.Return) bool {
	var e *callError
	return errors.As(err, &e) && slices.Contains(codes, e.code)
}

// optional drops the error that says that the GPU or the driver does not have what was asked for. The value is then
// the zero value.
func optional[T any](v T, err error) (T, error) {
	if hasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND) {
		return v, nil
	}
	return v, err
}

// systemError classes an error of a call that is about no GPU.
func systemError(err error) error {
	switch {
	case err == nil:
		return nil
	case hasCode(err, nvml.ERROR_DRIVER_NOT_LOADED):
		return noDriver(hintNotLoaded, fmt.Errorf("%w: %w", ErrDriverNotLoaded, err))
	case hasCode(err, nvml.ERROR_NO_PERMISSION):
		return noDriver(hintNoPermission, fmt.Errorf("%w: %w", ErrNoPermission, err))
	case errors.Is(err, ErrNoAnswer):
		return noDriver(hintNoAnswer, fmt.Errorf("the driver %w", err))
	default:
		return noDriver(hintLog, err)
	}
}
