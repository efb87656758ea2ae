package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/cmd/gpu-cdi-plugin/doctor"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/resource"
)

// errorTable gives the errors of the libraries an exit status and a hint, since libraries know neither statuses nor
// flags. The rows are in the order of the exit statuses. The first matching row counts, even if an error wraps or
// joins several errors. An error without a row has the status 1 and no hint.
var errorTable = []cli.ErrorRow{
	// Status 1: an error
	cli.Sentinel(trust.ErrUnsafe, cli.Failure, cli.HintUnsafe),
	cli.Typed(func(e *node.TakenError) (cli.Code, string) {
		hint := hintConflict(e.Conflicts[0])
		if e.Path != "" {
			hint += " and remove " + e.Path
		}
		return cli.Failure, hint
	}),
	cli.Typed(func(e *node.RequiredError) (cli.Code, string) {
		if e.Missing == "" {
			return cli.Failure, hintConflict(e.Conflict)
		}
		return cli.Failure, "make the channels (the driver makes channel 0 with NVreg_CreateImexChannel0=1, mknod " +
			"makes any; its major is that of nvidia-caps-imex-channels in /proc/devices), or set imex.required to false"
	}),
	// This row must be before that of node.SpecError, which may wrap the same error.
	cli.Sentinel(fileio.ErrHeld, cli.Locked,
		"stop the other instance, take its place with serve --take-over if it is a serve too, or give this one its own "+
			"--cdi-kind, --state-dir and --runtime-dir; fuser with the lock's path names its process"),
	cli.Sentinel(control.ErrOtherVersion, cli.Failure,
		"stop the other instance first; in Kubernetes, set updateStrategy.rollingUpdate to maxSurge 0, maxUnavailable 1 for "+
			"this rollout"),
	cli.Typed(func(e *agent.NotWritableError) (cli.Code, string) {
		return cli.Failure, "name a directory that can be made and written to, with --" + e.Option + ", the same on the host"
	}),
	cli.Typed(func(*node.SpecError) (cli.Code, string) {
		return cli.Failure, "use --cdi-dir to name a directory that can be created or written to"
	}),
	cli.Typed(func(*node.KindError) (cli.Code, string) {
		return cli.Failure, "remove it by hand if it is not needed, or name another directory with --cdi-dir"
	}),
	cli.Typed(func(e *cdi.ConflictError) (cli.Code, string) { return cli.Failure, hintConflict(e.Conflict) }),
	cli.Typed(func(*cdi.UntrustedError) (cli.Code, string) { return cli.Failure, cli.HintUnsafe + cli.HintInsecure }),
	cli.Typed(func(*cdi.OtherDriverError) (cli.Code, string) {
		return cli.Failure, "make a new config.json, then inject the devices"
	}),
	cli.Sentinel(cdi.ErrNothingOffered, cli.Failure,
		"gpu-cdi-plugin cdi generate --write makes the spec of this host's GPUs"),
	cli.Sentinel(cdi.ErrStale, cli.Failure, "gpu-cdi-plugin cdi diff shows whether the spec is out of date"),
	// RestrictAddressFamilies= of a unit has that effect.
	cli.Sentinel(unix.EAFNOSUPPORT, cli.Failure, "systemctl edit the service, with PrivateNetwork=no, "+
		"IPAddressAllow=localhost and RestrictAddressFamilies=AF_INET AF_INET6 in [Service], and restart it"),
	cli.Sentinel(metrics.ErrListen, cli.Failure,
		"give an address of this host and a port that is free with --listen, such as 127.0.0.1:9400"),
	cli.Sentinel(mps.ErrNoLimits, cli.Failure, "update the driver (535 can, 470 cannot), or share the GPU by "+
		"time-slicing"),
	cli.Sentinel(mps.ErrShm, cli.Failure,
		"run this by gpu-cdi-mps@.service or by the chart with mps.enabled, which mount the GPU's shared memory"),
	cli.Sentinel(control.ErrNotAllowed, cli.Failure, "run as root, or as the user that serve runs as"),
	cli.Typed(func(*install.ForeignError) (cli.Code, string) {
		return cli.Failure, "move it away if it is not needed; gpu-cdi-plugin hook print shows what would be in its place"
	}),
	cli.Typed(func(*install.SettingError) (cli.Code, string) {
		return cli.Failure, "change that by hand, then try again"
	}),
	cli.Typed(func(e *install.ReadOnlyError) (cli.Code, string) {
		return cli.Failure, "for live, set hooks_dir in CRI-O's configuration to /etc/containers/oci/hooks.d, then install " +
			"again; for gpu-cdi-runtime, install prestart-hook in a directory that can be written to, and name it with " +
			"--hook-path"
	}),
	cli.Sentinel(agent.ErrSuccessorEnded, cli.Failure, "start this instance again, as a supervisor does"),
	cli.Sentinel(doctor.ErrNoEngine, cli.Failure, "install it, or name another engine with --try"),
	cli.Sentinel(node.ErrUnknownDevice, cli.Failure, "gpu-cdi-plugin devices lists the devices of this host"),

	// Status 2: a usage error
	cli.Sentinel(cdi.ErrExtension, cli.Usage, ""),
	cli.Sentinel(cdi.ErrBadName, cli.Usage, ""),
	cli.Sentinel(mps.ErrNotGPU, cli.Usage, "gpu-cdi-plugin devices -o wide lists the UUIDs of this host's GPUs"),
	cli.Sentinel(install.ErrUnknown, cli.Usage, "gpu-cdi-plugin hook install without arguments lists them"),
	cli.Sentinel(plugin.ErrLongPath, cli.Usage, "give a directory with a shorter path, or a link to it"),
	cli.Typed(func(e *resource.TooManyDevicesError) (cli.Code, string) {
		if e.Shared == 0 {
			return cli.Usage, "give some of the devices another resource name with resources.gpus or resources.mig"
		}
		return cli.Usage, fmt.Sprintf("lower replicas in %s for %s to about %d for each shared device, "+
			"or share them under several names", e.Rules, e.Resource, e.Replicas)
	}),

	// Status 10: no usable driver. All errors after the first wrap gpu.ErrNoDriver, whose row is the last.
	cli.Sentinel(host.ErrUnsupported, cli.NoDriver,
		"do not install the NVIDIA driver for Linux there: it breaks the GPU. NVIDIA's toolkit supports WSL2 and Tegra"),
	cli.Sentinel(driver.ErrOtherVersion, cli.NoDriver,
		"reboot, or reload the kernel module, or install the libraries of its version"),
	cli.Sentinel(driver.ErrDamaged, cli.NoDriver, "install the NVIDIA driver again"),
	cli.Sentinel(driver.ErrNoControl, cli.NoDriver, "load the kernel module and make its device nodes (gpu-cdi-plugin "+
		"device make-nodes), or name the directory whose dev/ has them with --dev-root"),
	cli.Sentinel(driver.ErrNoCUDA, cli.NoDriver,
		"install the NVIDIA driver again with its CUDA library, or leave compute out of --capabilities"),
	cli.Sentinel(nvml.ErrLibraryNotFound, cli.NoDriver,
		"install the NVIDIA driver, or name its root with --driver-root or the library with --nvml-library; "+
			"gpu-cdi-plugin cdi generate --explain lists where it was searched for"),
	cli.Sentinel(nvml.ErrLibraryUnusable, cli.NoDriver,
		"name the libnvidia-ml.so.1 of the installed driver, built for this machine, or install the driver again if "+
			"the file is damaged"),
	cli.Sentinel(nvml.ErrLibraryConflict, cli.NoDriver,
		"start the process again; it can use only one NVIDIA driver library"),
	cli.Sentinel(nvml.ErrDriverNotLoaded, cli.NoDriver,
		"load the kernel module (modprobe nvidia); if that fails, the kernel log has the reason (dmesg)"),
	cli.Sentinel(nvml.ErrNoControlNode, cli.NoDriver,
		"gpu-cdi-plugin device make-nodes makes the device nodes that are missing; a container must have them too"),
	cli.Sentinel(nvml.ErrVersionMismatch, cli.NoDriver,
		"reboot, or stop everything that uses the GPUs and reload the kernel modules"),
	cli.Sentinel(nvml.ErrNoPermission, cli.NoDriver,
		"run as root, or as a user who may open /dev/nvidiactl and /dev/nvidia*; a container must have these device "+
			"nodes"),
	cli.Sentinel(gpu.ErrNotAnswering, cli.NoDriver,
		"see the kernel log (dmesg) for messages of NVRM; a GPU that hangs needs a reset or a reboot"),
	cli.Sentinel(nvml.ErrDriverFailed, cli.NoDriver, "see the kernel log (dmesg) for messages of NVRM"),
	cli.Sentinel(gpu.ErrNoDriver, cli.NoDriver, "install the NVIDIA driver, or name the directory that it is in with "+
		"--driver-root (that of a driver container is usually /run/nvidia/driver)"),

	// Statuses 11 and 13. Status 12, another instance, is above.
	cli.Sentinel(errNoGPU, cli.NoGPU,
		"see whether lspci -d 10de: lists a GPU, and the kernel log (dmesg) for messages of NVRM"),
	cli.Sentinel(control.ErrNoServer, cli.Unreachable,
		"start gpu-cdi-plugin serve (systemctl start gpu-cdi-plugin.service; without a kubelet device-manager.service), or "+
			"name the directory that it was given with --runtime-dir"),
	cli.Sentinel(plugin.ErrNoKubelet, cli.Unreachable,
		"name the kubelet's directory with --device-plugin-dir or --plugins-registry-dir"),
}

// hintConflict returns a hint about another spec file that defines a device name of ours.
func hintConflict(c cdi.Conflict) string {
	return "remove " + c.File + ", and what writes it (gpu-cdi-plugin doctor names NVIDIA's service), or choose another " +
		"kind with --cdi-kind VENDOR/CLASS"
}

// statuses are the exit statuses as described in the help.
var statuses = map[cli.Code]string{
	cli.OK:          "done",
	cli.Failure:     "an error",
	cli.Usage:       "a usage error, or a wrong value in the environment or the configuration file",
	cli.Partial:     "partly done: some of the GPUs, files or containers are missing from the result",
	cli.Differs:     "the check found differences",
	cli.NoDriver:    "there is no NVIDIA driver, or it cannot be used",
	cli.NoGPU:       "there is a driver, but no GPU",
	cli.Locked:      "another instance is running",
	cli.Unreachable: "there is no kubelet or no serve, or it cannot be reached",
	cli.Interrupted: "interrupted",
}

// partly returns the error of a verb that has done only a part of its work.
func partly(hint, format string, args ...any) error {
	return cli.With(cli.Partial, hint, fmt.Errorf(format, args...))
}
