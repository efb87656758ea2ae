package resource

import (
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Resource is an extended resource with its devices.
type Resource struct {
	// Name is VENDOR/NAME, such as "nvidia.com/gpu".
	Name string
	// Devices are sorted by GPU, MIG device and replica. The list may be empty.
	Devices []Device
	// Limit is the maximum number of devices for a container, or 0 for any number. LimitReason says why there is a
	// limit.
	Limit       int
	LimitReason string
	// Grant is what a container with any device of the resource gets once, besides the Grant of each device; or nil.
	Grant *Grant
}

// Device is a device as the kubelet knows it: a GPU, a MIG device, or a replica of a GPU or MIG device.
type Device struct {
	// ID is the device ID: the UUID, or "UUID::REPLICA". It has at most 63 bytes.
	ID string
	// UUID is "GPU-..." or "MIG-...".
	UUID string
	// Parent is the UUID of the device's GPU. For a whole GPU it is the same as UUID.
	Parent string
	// Index is the driver's index of the GPU. MIGIndex is the index of the MIG device on that GPU, or NoMIG.
	Index, MIGIndex int
	// IndexName is the device's index in CDI names: "3", or "0:1" for a MIG device.
	IndexName string
	// Replica is the number of the replica, from 0, or NoReplica if the device is not shared.
	Replica int
	// NUMANode is the NUMA node of the GPU. If it is gpu.NoNUMANode, the device is advertised without a topology.
	NUMANode int
	// Healthy says whether the device can be allocated. If not, Reason says why, as part of a sentence.
	Healthy bool
	Reason  string
	// Fault says that Reason is a fault of the device itself, from which it may recover.
	Fault bool
	// InUse says that Reason is only that something uses the device without a container.
	InUse bool
	// Ending says that Reason is only that a container has the device that is ending. Who gets the device waits for that.
	Ending bool
	// Model is the GPU's product name, and Profile the MIG device's profile, or empty.
	Model, Profile string
	// PCIBusID is the GPU's PCI address as in sysfs, such as "0000:3b:00.0".
	PCIBusID string
	// MemoryBytes is the memory of the GPU or of the MIG device, in bytes.
	MemoryBytes uint64
	// MPS has the limits of a container if MPS shares the GPU; otherwise it is nil.
	MPS *MPSLimits
	// Grant is what a container gets for the device. It is nil until the node has published the device.
	Grant *Grant
}

// Grant is what a container gets. It is immutable once published.
type Grant struct {
	// CDIDevices are qualified CDI names, such as "nvidia.com/gpu=GPU-...".
	CDIDevices []string
	// WithoutCDI are the device nodes, mounts and variables of these CDI devices, for runtimes without CDI.
	WithoutCDI specs.ContainerEdits
	// Always are further mounts and variables, which a container gets with any runtime.
	Always specs.ContainerEdits
}

// MPSLimits are the limits of each client of a GPU's MPS control daemon. The JSON is that of a device's descriptor.
type MPSLimits struct {
	// MemoryBytes is the memory that a client may use on the GPU, a whole number of MiB.
	MemoryBytes uint64 `json:"memoryLimitBytes"`
	// ThreadPercent is the percentage of the GPU's threads that a client may use, from 1 to 100, or 0 if the GPU does
	// not support this limit.
	ThreadPercent int `json:"activeThreadPercentage,omitempty"`
}

// NoReplica is the Replica of a device that is not shared, and NoMIG the MIGIndex of a whole GPU.
const (
	NoReplica = -1
	NoMIG     = -1
)

// Shared reports whether other containers may have the same GPU or MIG device.
func (d *Device) Shared() bool { return d.Replica != NoReplica }

// MarkUnhealthy marks each healthy device as unhealthy for which the function `reason` returns a reason. It returns a
// changed copy.
func MarkUnhealthy(resources []Resource, reason func(*Device) string) []Resource {
	list := slices.Clone(resources)
	for i := range list {
		list[i].Devices = slices.Clone(list[i].Devices)
		for j := range list[i].Devices {
			d := &list[i].Devices[j]
			if !d.Healthy {
				continue
			}
			if text := reason(d); text != "" {
				d.Healthy, d.Reason = false, text
			}
		}
	}
	return list
}

// Finding is a remark about what the configuration means for the devices of the node.
type Finding struct {
	// Text is a sentence that begins with the GPU, the MIG device, the resource or the key of the configuration.
	Text string
	// Severe means that a device is not offered in the way that was probably intended.
	Severe bool
}
