package main

import (
	"errors"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/metrics"
	"gpu-cdi-plugin/mps"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/plugin"
	"gpu-cdi-plugin/resource"
)

// errorTable gives the libraries' errors their exit status and the hint what to do about them. The first row that
// matches counts.
var errorTable = []errorRow{
	sentinel(lock.ErrHeld, exit.Locked, "stop the other instance first; fuser, given the lock's path, names its process"),
	typed(func(e *node.TakenError) (exit.Code, string) {
		hint := hintConflict(e.Conflicts[0].File)
		if e.Path != "" {
			hint += " and remove " + e.Path
		}
		return exit.Failure, hint
	}),
	typed(func(e *node.RequiredError) (exit.Code, string) {
		if e.Missing == "" {
			return exit.Failure, hintConflict(e.Conflict.File)
		}
		return exit.Failure, "make the channels (the driver makes channel 0 with NVreg_CreateImexChannel0=1, mknod makes any; " +
			"its major is that of nvidia-caps-imex-channels in /proc/devices), or set imex.required to false"
	}),
	typed(func(*node.SpecError) (exit.Code, string) {
		return exit.Failure, "name a directory that can be made or written to, with --cdi-dir"
	}),
	typed(func(*node.KindError) (exit.Code, string) {
		return exit.Failure, "remove it by hand if it is not needed, or name another directory with --cdi-dir"
	}),
	sentinel(driver.ErrOtherVersion, exit.NoDriver, "reboot, or reload the kernel module, or install the libraries of its version"),
	sentinel(driver.ErrDamaged, exit.NoDriver, "install the NVIDIA driver again"),
	sentinel(driver.ErrNoCUDA, exit.NoDriver,
		"install the NVIDIA driver again with its CUDA library, or leave compute out of --capabilities"),
	sentinel(gpu.ErrNoDriver, exit.NoDriver, "install the NVIDIA driver, or name the directory that it is in with --driver-root "+
		"(that of a driver container is usually /run/nvidia/driver)"),
	sentinel(errNoGPU, exit.NoGPU, "see whether lspci -d 10de: lists a GPU, and the kernel log (dmesg) for messages of NVRM"),
	sentinel(nvml.ErrLibraryNotFound, exit.NoDriver, "install the NVIDIA driver, or name its root with --driver-root or the "+
		"library with --nvml-library; gpu-cdi-plugin cdi generate --explain says where it was looked for"),
	sentinel(nvml.ErrLibraryUnusable, exit.NoDriver, "name the libnvidia-ml.so.1 of the installed driver, built for this "+
		"machine, or install the driver again if the file is damaged"),
	sentinel(nvml.ErrLibraryConflict, exit.NoDriver, "start the process again; it can use one NVIDIA driver library only"),
	sentinel(nvml.ErrDriverNotLoaded, exit.NoDriver,
		"load the kernel module (modprobe nvidia); if that fails, the kernel log says why (dmesg)"),
	sentinel(nvml.ErrVersionMismatch, exit.NoDriver,
		"reboot, or stop everything that uses the GPUs and reload the kernel modules"),
	sentinel(nvml.ErrNoPermission, exit.NoDriver, "run as root, or as a user who may open /dev/nvidiactl and /dev/nvidia*; "+
		"in a container the nodes must be given to it"),
	sentinel(gpu.ErrNotAnswering, exit.NoDriver,
		"see the kernel log (dmesg) for messages of NVRM; a GPU that hangs needs a reset or a reboot"),
	sentinel(nvml.ErrDriverFailed, exit.NoDriver, "see the kernel log (dmesg) for messages of NVRM"),
	sentinel(plugin.ErrNoKubelet, exit.Unreachable,
		"start the kubelet, which makes the directory, or name its own with --device-plugin-dir or --plugins-registry-dir"),
	sentinel(plugin.ErrLongPath, exit.Usage, "give a directory with a shorter path, or a link to it"),
	sentinel(metrics.ErrListen, exit.Failure,
		"give an address of this host and a port that is free with --listen, such as 127.0.0.1:9400"),
	sentinel(mps.ErrPIDNamespace, exit.Failure, "set hostPID: true in the pod's spec, or do not share GPUs by MPS"),
	typed(func(e *resource.TooManyDevicesError) (exit.Code, string) { return exit.Usage, e.Advice }),
}

// errorRow returns the exit status and the hint of an error that it knows.
type errorRow func(error) (code exit.Code, hint string, ok bool)

// sentinel is the row of the errors that wrap target.
func sentinel(target error, code exit.Code, hint string) errorRow {
	return func(err error) (exit.Code, string, bool) { return code, hint, errors.Is(err, target) }
}

// typed is the row of the errors that are, or wrap, an E.
func typed[E error](describe func(E) (exit.Code, string)) errorRow {
	return func(err error) (exit.Code, string, bool) {
		e, ok := errors.AsType[E](err)
		if !ok {
			return 0, "", false
		}
		code, hint := describe(e)
		return code, hint, true
	}
}

// hintConflict is what to do about a CDI spec file that defines names of ours.
func hintConflict(file string) string {
	return "remove " + file + ", or choose another kind with --cdi-kind VENDOR/CLASS"
}

// classify returns err with the exit status and the hint of the table, unless it carries its own.
func classify(err error) error {
	if _, own := errors.AsType[*exit.Error](err); own {
		return err
	}
	for _, row := range errorTable {
		if code, hint, ok := row(err); ok {
			return exit.With(code, hint, err)
		}
	}
	return err
}
