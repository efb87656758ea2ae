package gpu

// NoRecoveryAction is the recovery action of a driver that does not report one.
const NoRecoveryAction = -1

// Probe is what the driver reports about a GPU's health at one time. What a driver or a GPU does not report is the zero
// value, unless a field says otherwise.
type Probe struct {
	// UUID is the GPU's.
	UUID string
	// Error is why the GPU does not answer; all else is then unknown.
	Error string
	// Lost is whether the driver reports that the GPU is lost, or that it has no such GPU. Error is then set too.
	Lost bool
	// NeedsReset is whether the driver reports that the GPU cannot be used before a reset. Error is then set too.
	NeedsReset bool
	// MIGEnabled is whether the GPU is in MIG mode.
	MIGEnabled bool
	// RecoveryAction is NVML's nvmlDeviceGpuRecoveryAction_t, or NoRecoveryAction. Drivers add values.
	RecoveryAction int
	// RemapPending is whether a row of the memory is remapped at the next reset, and RemapFailed whether a row could
	// not be remapped.
	RemapPending, RemapFailed bool
	// RetirementPending is whether a page of the memory is retired at the next reset; older GPUs do so.
	RetirementPending bool
	// UncorrectedECC counts the uncorrected errors of the memory since the driver was loaded. It is as in the probe
	// before if it could not be read.
	UncorrectedECC uint64
	// NVLinks has a bit for each NVLink that is up, or that was up in the probe before if its state could not be read.
	NVLinks uint64
	// Fabric is the state of the GPU on a machine with NVSwitches.
	Fabric Fabric
	// Temperature and ShutdownTemperature are in degrees Celsius; the second is 0 if it is unknown.
	Temperature, ShutdownTemperature int
}

// Fabric is how far a GPU is part of the NVSwitches' fabric.
type Fabric int

// The states of a GPU in the fabric.
const (
	NoFabric        Fabric = iota // the machine has none
	FabricStarting                // the fabric manager has not configured the GPU yet
	FabricCompleted               // the GPU is part of the fabric
	FabricFailed                  // the GPU could not be made a part of it
)

// Event is what the driver reported about a GPU when it happened.
type Event struct {
	// GPU is the UUID.
	GPU string
	// GPUInstance and ComputeInstance are the IDs of what it concerns, or NoInstance for all of the GPU.
	GPUInstance, ComputeInstance int
	Kind                         EventKind
	// XID is the code of an EventXID.
	XID uint64
	// RecoveryAction is as in Probe, after the event.
	RecoveryAction int
	// Err is, for EventSource, why events of the GPU are not received, or nil once they are. See also EventUnbind.
	Err error
}

// NoInstance is the ID of the instance of an event that concerns all of a GPU.
const NoInstance = -1

// EventKind is what an Event is.
type EventKind string

// The kinds of events.
const (
	EventXID         EventKind = "xid"
	EventECC         EventKind = "uncorrected-ecc"
	EventRecovery    EventKind = "recovery-action"
	EventUnavailable EventKind = "unavailable"
	EventMIG         EventKind = "mig"
	// EventSource is that events of the GPU begin or cease to be received.
	EventSource EventKind = "source"
	// EventUnbind is that the driver is about to be unbound from a GPU, which is not named. The kernel waits with that
	// until no program has the GPU open. With Err, such events are not received.
	EventUnbind EventKind = "unbind"
)

// Use is what uses a device at one time.
type Use struct {
	// Processes have a compute or graphics context on the device, by PID. ProcessesUnknown is whether the driver does not
	// report those with a compute context, as in some virtual machines.
	Processes        []Process
	ProcessesUnknown bool
	// MemoryUsed is the memory in bytes that is neither free nor reserved by the driver. MemoryUnknown is whether the
	// driver does not report it, as for a GPU without memory of its own.
	MemoryUsed    uint64
	MemoryUnknown bool
}

// Process is a process with a context on a device.
type Process struct {
	// PID is the process ID in the host's namespace.
	PID int
	// Compute, Graphics and MPS are the kinds of context that it has: MPS is that of a client of CUDA's Multi-Process
	// Service.
	Compute, Graphics, MPS bool
	// MemoryBytes is the memory that it has on the device, or 0 if the driver does not report it.
	MemoryBytes uint64
}
