// Package prepare prepares a device for the container that is about to get it: it checks that the device is healthy
// and that nothing uses it and, by policy, puts its settings back and resets the GPU. A device that does not pass is
// not given to the container. [FreedChecker] checks a device after its last container.
//
// The package knows no door and calls the driver only through [Options].Driver. Outside the host's PID namespace the
// driver shows no processes of others: then the policies above Check judge a device's use by its memory alone, and
// Check skips the memory too.
package prepare

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// Policy is what is done with a device before a container gets it.
type Policy string

// The policies.
const (
	None  Policy = "none"
	Check Policy = "check" // the device is healthy and unused
	Clean Policy = "clean" // its settings are at their defaults
	Reset Policy = "reset" // it was reset
)

// Policies lists the policies. Each does what those before it do.
func Policies() []Policy { return []Policy{None, Check, Clean, Reset} }

// includes reports whether the policy does what another does.
func (p Policy) includes(other Policy) bool {
	return slices.Index(Policies(), p) >= slices.Index(Policies(), other)
}

// DefaultMemoryTolerance is the memory, in bytes, that may be used on a device without processes. NVML's "used" leaves
// out what the driver reserves; drivers report some MiB on an idle GPU and tens of MiB with a console on it. The
// context of a process takes more, and is found by the process besides.
const DefaultMemoryTolerance = 256 << 20

// Rules are what a resource's devices are prepared by.
type Rules struct {
	Policy Policy
	// Strict refuses a device that policy Reset cannot reset. Without it, such a device is cleaned.
	Strict bool
	// Programs may use the device by the names of their executables; see [DefaultPrograms]. Only processes of the host
	// and privileged ones are excused by their name.
	Programs []string
	// MemoryTolerance is the memory in bytes that may be in use; see [DefaultMemoryTolerance].
	MemoryTolerance uint64
	// Exec is an administrator's program that runs last, also with the policy None. An empty Path is none. Its failure
	// refuses the device. Its environment has GPU_DEVICE_UUID, GPU_UUID, GPU_PCI_BUS_ID, GPU_POLICY and GPU_SHARED.
	// GPU_SHARED has the reason why others may use the device too, and is empty if they may not.
	Exec Program
}

// Device is a device that a container is about to get.
type Device struct {
	// UUID is the device's, and GPU that of the GPU that it is on, or its own.
	UUID, GPU string
	// PCIBusID is the GPU's address, such as "0000:17:00.0".
	PCIBusID string
	// Nodes are the paths of the GPU's device nodes on the host, or none if they are unknown. A GPU of which a process
	// has one open is not reset.
	Nodes []string
	// SharesMemory is whether a MIG device has its memory together with others: they have the same GPU instance.
	SharesMemory bool
	// Exclusive is whether the GPU's compute mode is to be EXCLUSIVE_PROCESS, as MPS needs.
	Exclusive bool
	// Others returns the other containers that have the GPU already, or "". State.Shared knows only what is offered
	// now; a container can have the GPU as a replica or under another resource name from before a reload, or from
	// another device plugin. It is called before a whole GPU is changed, and must return soon. It may be nil.
	Others func() (reason string, err error)
}

// whole reports whether the device is all of its GPU.
func (d *Device) whole() bool { return d.UUID == d.GPU }

// Driver is what the driver is asked for. UUIDs name devices. nvml.Session implements it.
type Driver interface {
	// Use returns what uses a device. Errors of this method and the next two may wrap gpu.ErrResetRequired.
	Use(ctx context.Context, uuid string) (gpu.Use, error)
	// RestoreDefaults puts the settings of a GPU back and returns what was not at its default.
	RestoreDefaults(ctx context.Context, uuid string, exclusive bool) ([]string, error)
	// SetPersistence sets the persistence mode of a GPU and returns whether that changed it.
	SetPersistence(ctx context.Context, uuid string, on bool) (bool, error)
	// Release closes the driver, so that this process does not keep a GPU from its reset. No method of Driver or State
	// is called by this package until Reopen, and the driver must stay closed until then whoever else uses it.
	Release(ctx context.Context) error
	// Reopen ends Release.
	Reopen(ctx context.Context) error
}

// State is what the node knows about its devices.
type State interface {
	// Healthy probes a device and returns why a container must not have it, or nil. The error is a *[NeedsResetError] if
	// a reset of the GPU may end that.
	Healthy(ctx context.Context, uuid string) error
	// Shared returns why other containers may use the same device, such as "it has 4 replicas", or "". It says nothing
	// of the other MIG devices of a GPU.
	Shared(ctx context.Context, uuid string) (reason string, err error)
	// WasReset is called after a GPU was reset, before it is probed again.
	WasReset(uuid string)
	// CannotReset returns what SetCannotReset was called with, until the driver changes or the GPU is reset, or "".
	CannotReset(uuid string) string
	// SetCannotReset is called after a reset of a GPU was refused for a reason that lasts.
	SetCannotReset(uuid, reason string)
}

// NeedsResetError reports why a device is not healthy that a reset of its GPU may heal.
type NeedsResetError struct{ Err error }

// Error is why.
func (e *NeedsResetError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *NeedsResetError) Unwrap() error { return e.Err }

// Options are what a Runner works with. All but Resetter are needed.
type Options struct {
	Host   host.Host
	Driver Driver
	State  State
	// Resetter resets GPUs. Without it no GPU can be reset.
	Resetter Resetter
	// Check refuses programs that others than root could change. Nil is trust.RootFile.
	Check func(path string) error
	// AwaitUnused is how long processes and memory of a container that has just ended may stay on its device; 0 is 5 s.
	AwaitUnused time.Duration
	// Log gets warnings that are not about a container.
	Log *slog.Logger
}
