package resource

import (
	"fmt"
	"slices"
	"strconv"
)

// Resource is an extended resource and the devices that can be had under its name.
type Resource struct {
	// Name is VENDOR/NAME, such as "nvidia.com/gpu". The kubelet accepts it.
	Name string
	// Devices are sorted by GPU, MIG device and replica. There may be none.
	Devices []Device
	// Limit is the most devices that a container may ask for, or 0 if there is no limit. LimitReason says why there is one.
	Limit       int
	LimitReason string
	// Grant is what every container with a device of the resource gets besides the devices' own grants, or nil.
	Grant *Grant
}

// Device is what the kubelet counts: a GPU, a MIG device, or a replica of one.
type Device struct {
	// ID is the name that the kubelet knows it by: the UUID, or "UUID::REPLICA". It has at most MaxID bytes.
	ID string
	// UUID is "GPU-..." or "MIG-...".
	UUID string
	// Parent is the UUID of the GPU: that of the device itself, unless it is a MIG device.
	Parent string
	// Index is the driver's index of the GPU, and MIGIndex that of the MIG device on it, or NoMIG.
	Index, MIGIndex int
	// Replica counts the replicas of a device from 0; it is NoReplica if the device is not shared.
	Replica int
	// NUMANode is that of the GPU, or gpu.NoNUMANode: then the kubelet must be told no topology at all.
	NUMANode int
	// Healthy tells whether the device can be given to a container. If not, Reason says why, in a sentence's part.
	Healthy bool
	Reason  string
	// Model is the GPU's product name, and Profile the MIG device's profile, or empty.
	Model, Profile string
	// PCIBusID is the GPU's address as sysfs writes it.
	PCIBusID string
	// MemoryBytes is the memory of the GPU or of the MIG device, in bytes.
	MemoryBytes uint64
	// Minor is the N of the GPU's /dev/nvidiaN, and GPUInstanceCap and ComputeInstanceCap are those of the MIG device's
	// /dev/nvidia-caps/nvidia-capN. Each may be gpu.NoMinor.
	Minor, GPUInstanceCap, ComputeInstanceCap int
	// MPS is what a container may use of a GPU that is shared by MPS, and nil for every other device.
	MPS *MPSLimits
	// Grant is what a container gets for the device, or nil before the node has published it.
	Grant *Grant
}

// MPSLimits is what each client of a GPU's MPS control daemon may use.
type MPSLimits struct {
	// MemoryBytes is a whole number of MiB.
	MemoryBytes uint64
	// ThreadPercent is the part of the GPU's threads, from 1 to 100, or 0 for a GPU that knows no such limit.
	ThreadPercent int
	// SharedMemoryBytes is the size of the /dev/shm that all of the GPU's clients have together.
	SharedMemoryBytes uint64
}

// NoReplica is the replica of a device that is not shared, and NoMIG the MIG index of a whole GPU.
const (
	NoReplica = -1
	NoMIG     = -1
)

// CDIName is the device's name in CDI specs and variables: its UUID or, by index, "3" or "0:1" for a MIG device.
func (d *Device) CDIName(byIndex bool) string {
	switch {
	case !byIndex:
		return d.UUID
	case d.MIGIndex == NoMIG:
		return strconv.Itoa(d.Index)
	default:
		return fmt.Sprintf("%d:%d", d.Index, d.MIGIndex)
	}
}

// Shared reports whether other containers may have the same device.
func (d *Device) Shared() bool { return d.Replica != NoReplica }

// MarkUnhealthy returns the resources with each healthy device marked as unhealthy for which reason returns one. The
// argument is not changed.
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

// Finding is something about the node that the configuration makes noteworthy.
type Finding struct {
	// About names the GPU, the MIG device, the resource or the key of the configuration.
	About string
	// Text says what is the matter; behind About it makes a sentence.
	Text string
	// Problem tells that something cannot be had that was probably meant to be.
	Problem bool
}

// String is the finding in a line.
func (f Finding) String() string { return f.About + " " + f.Text }
