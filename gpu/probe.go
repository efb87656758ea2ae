package gpu

// NoRecoveryAction means that the driver does not report a recovery action.
const NoRecoveryAction = -1

// Probe is what the driver reports about a GPU's health at one time. A value that the driver or the GPU does not
// report is the zero value, unless the field says otherwise.
type Probe struct {
	// UUID is the UUID of the GPU.
	UUID string
	// Error says why the GPU does not answer. If it is set, only Lost and NeedsReset of the other fields are known.
	Error string
	// Late means that the GPU has not answered yet: the other fields are those of an earlier probe.
	Late bool
	// Lost means that the driver reports the GPU as lost, or that it has no such GPU. Error is then set too.
	Lost bool
	// NeedsReset means that the driver cannot use the GPU before a reset. Error is then set too.
	NeedsReset bool
	// MIGEnabled says whether the GPU is in MIG mode.
	MIGEnabled bool
	// RecoveryAction is NVML's nvmlDeviceGpuRecoveryAction_t, or NoRecoveryAction. Newer drivers have more values.
	RecoveryAction int
	// RemapPending means that a row of the memory will be remapped at the next reset, and RemapFailed that a row could
	// not be remapped.
	RemapPending, RemapFailed bool
	// RetirementPending means that a page of the memory will be retired at the next reset, on older GPUs.
	RetirementPending bool
	// UncorrectedECC is the number of uncorrected errors of the memory since the driver was loaded. If it could not be
	// read, it is the number of the previous probe.
	UncorrectedECC uint64
	// NVLinks has a bit for each NVLink that is up. If the state of a link is unknown, its bit is that of the previous
	// probe.
	NVLinks uint64
	// Fabric is the GPU's state in the fabric of a machine with NVSwitches.
	Fabric Fabric
	// Temperature and ShutdownTemperature are in degrees Celsius. ShutdownTemperature is 0 if unknown.
	Temperature, ShutdownTemperature int
}

// Fabric is the state of a GPU in the NVSwitches' fabric.
type Fabric int

// The states of a GPU in the fabric.
const (
	NoFabric        Fabric = iota // the machine has none
	FabricStarting                // the fabric manager has not configured the GPU yet
	FabricCompleted               // the GPU is part of the fabric
	FabricFailed                  // the GPU could not join the fabric
	FabricUnhealthy               // the GPU is part of the fabric and cannot use it
)

// Event is an event that the driver reports about a GPU.
type Event struct {
	// GPU is the UUID of the GPU.
	GPU string
	// GPUInstance and ComputeInstance are the IDs of the affected instances, or NoInstance for the whole GPU.
	GPUInstance, ComputeInstance int
	Kind                         EventKind
	// XID is the code if the event is an EventXID.
	XID uint64
	// RecoveryAction is the recovery action after the event; see Probe.
	RecoveryAction int
	// Err is set by EventSource: it says why events of the GPU are not received, or is nil once they are. See also
	// EventUnbind.
	Err error
}

// NoInstance is the instance ID of an event that concerns a whole GPU.
const NoInstance = -1

// EventKind is the kind of an Event.
type EventKind string

// The kinds of events.
const (
	EventXID         EventKind = "xid"
	EventECC         EventKind = "uncorrected-ecc"
	EventRecovery    EventKind = "recovery-action"
	EventUnavailable EventKind = "unavailable"
	EventMIG         EventKind = "mig"
	// EventSource means that events of the GPU are received from now on, or no longer.
	EventSource EventKind = "source"
	// EventUnbind means that the driver is about to be unbound from a GPU, which the event does not name. The kernel
	// waits until no program has the GPU open. If Err is set, such events are not received.
	EventUnbind EventKind = "unbind"
)

// Use says what uses a device at one time.
type Use struct {
	// Processes are those with a compute or graphics context on the device, by PID. ProcessesUnknown means that the
	// driver does not report processes with a compute context, for example in some virtual machines.
	Processes        []Process
	ProcessesUnknown bool
	// MemoryUsed is the memory in bytes that is neither free nor reserved by the driver. MemoryUnknown means that the
	// driver does not report it, for example for a GPU without its own memory.
	MemoryUsed    uint64
	MemoryUnknown bool
}

// Process is a process with a context on a device.
type Process struct {
	// PID is the process ID in the host's namespace.
	PID int
	// Compute, Graphics and MPS say which kinds of context the process has. MPS is the context of a client of CUDA's
	// Multi-Process Service.
	Compute, Graphics, MPS bool
	// MemoryBytes is the memory that the process uses on the device, or 0 if the driver does not report it.
	MemoryBytes uint64
}
