// Package prepare prepares a device for the container that is about to get it: it checks that the device is healthy
// and unused and, depending on the policy, restores its settings and resets the GPU. A device that does not pass is
// withheld from the container. [UseChecker] checks the devices that no container has.
//
// The package calls the driver only through [Options].Driver. Outside the host's PID namespace the driver shows no
// other processes: the policies above Check then judge a device's use only by its memory, and Check does not check the
// memory either.
package prepare

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// Policy selects what is done with a device before a container gets it.
type Policy string

// The policies, from the least to the most thorough.
const (
	None  Policy = "none"
	Check Policy = "check" // the device must be healthy and unused
	Clean Policy = "clean" // its settings are restored to their defaults
	Reset Policy = "reset" // it is reset
)

// Policies lists the policies. Each includes those before it.
func Policies() []Policy { return []Policy{None, Check, Clean, Reset} }

// Includes reports whether the policy includes another.
func (p Policy) Includes(other Policy) bool {
	return slices.Index(Policies(), p) >= slices.Index(Policies(), other)
}

// DefaultMemoryTolerance is the memory, in bytes, that may be used on a device without processes. NVML's "used"
// excludes what the driver reserves; drivers report some MiB on an idle GPU and tens of MiB with a console on it. The
// context of a process takes more, and the check of processes finds it too.
const DefaultMemoryTolerance = 256 << 20

// Rules determine how a resource's devices are prepared.
type Rules struct {
	Policy Policy
	// Strict refuses a device that policy Reset cannot reset. Otherwise such a device is only cleaned.
	Strict bool
	// Programs are the names of executables that may use the device; see [DefaultPrograms]. A name excuses processes of
	// root, of system accounts and of users at a seat only.
	Programs []string
	// MemoryTolerance is how many bytes of memory may be in use; see [DefaultMemoryTolerance].
	MemoryTolerance uint64
	// Exec is an administrator's program that runs last, also with the policy None; optional. If it fails, the device
	// is refused. Its environment has GPU_DEVICE_UUID, GPU_UUID, GPU_PCI_BUS_ID, GPU_POLICY and GPU_SHARED. GPU_SHARED
	// is the reason why others may use the device too, or empty.
	Exec Program
}

// Device is a device that a container is about to get.
type Device struct {
	// UUID identifies the device. GPU is the UUID of its GPU, which for a whole GPU is the same.
	UUID, GPU string
	// PCIBusID is the GPU's address, such as "0000:17:00.0".
	PCIBusID string
	// Nodes are the paths of the GPU's device nodes on the host, or none if they are unknown. A GPU is not reset while
	// a process has one of them open.
	Nodes []string
	// Replica says that other containers may have the device too, although State.Shared may not say so any more.
	Replica bool
	// SharesMemory says that a MIG device shares its memory with others, which have the same GPU instance.
	SharesMemory bool
	// Exclusive says that the GPU's compute mode must be EXCLUSIVE_PROCESS, as MPS needs.
	Exclusive bool
}

// whole reports whether the device is a whole GPU.
func (d *Device) whole() bool { return d.UUID == d.GPU }

// Driver calls the driver. Devices are identified by UUID. nvml.Session implements it.
type Driver interface {
	// Use returns what uses a device. The errors of this method and the next two may wrap gpu.ErrResetRequired.
	Use(ctx context.Context, uuid string) (gpu.Use, error)
	// RestoreDefaults restores the settings of a GPU and returns those that were not at their default.
	RestoreDefaults(ctx context.Context, uuid string, exclusive bool) ([]string, error)
	// SetPersistence sets the persistence mode of a GPU and returns whether the mode changed.
	SetPersistence(ctx context.Context, uuid string, on bool) (bool, error)
	// Release closes the driver, so that this process does not block a reset. This package calls no method of Driver
	// or State until Reopen. The driver must stay closed until then, whatever its other users do.
	Release(ctx context.Context) error
	// Reopen ends Release.
	Reopen(ctx context.Context) error
}

// State has the node's view of its devices.
type State interface {
	// Healthy probes a device and returns why no container may have it, or nil. The error is a *[NeedsResetError] if a
	// reset of the GPU may heal the device.
	Healthy(ctx context.Context, uuid string) error
	// Shared returns why other containers may use the same device, such as "it has 4 replicas", or "". It does not
	// consider other MIG devices of a GPU.
	Shared(uuid string) (reason string)
	// WasReset is called after a GPU was reset, before it is probed again.
	WasReset(uuid string)
	// HoldForReset takes a GPU whose reset hangs out of service, for a reason that is part of a sentence. EndHold ends
	// that when the reset has ended.
	HoldForReset(uuid, reason string)
	EndHold(uuid string)
	// CannotReset returns the last reason of SetCannotReset until the driver changes or the GPU is reset, or "".
	CannotReset(uuid string) string
	// SetCannotReset records a lasting reason for which a reset of a GPU was refused.
	SetCannotReset(uuid, reason string)
}

// NeedsResetError means that a device is unhealthy and that a reset of its GPU may heal it.
type NeedsResetError struct{ Err error }

func (e *NeedsResetError) Error() string { return e.Err.Error() }

func (e *NeedsResetError) Unwrap() error { return e.Err }

// Options are the parameters of a Runner. All but Resetter, Check and AwaitUnused are required.
type Options struct {
	Host   host.Host
	Driver Driver
	State  State
	// Resetter resets GPUs. Without it no GPU can be reset.
	Resetter Resetter
	// Check refuses programs that users other than root could change. Nil means trust.RootFile.
	Check func(path string) error
	// AwaitUnused is how long processes and memory of an ended container may stay on its device; 0 means 5 s.
	AwaitUnused time.Duration
	// Log gets warnings that are not about a container.
	Log *slog.Logger
}
