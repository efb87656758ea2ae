// Package model has the values that the device manager works with: resources and their devices as plugins list them,
// pods as manifests describe them, and what their containers got. It is pure.
package model

import (
	"slices"
	"time"
)

// Resource is a resource that a plugin offers.
type Resource struct {
	// Name is the extended resource's name, like nvidia.com/gpu.
	Name string
	// Devices are sorted by ID, and no two have the same ID.
	Devices []Device
	// Connected reports whether the plugin's ListAndWatch stream is open. If not, no device is healthy.
	Connected bool
}

// Device is a device as its plugin lists it.
type Device struct {
	ID      string
	Healthy bool
	// NUMA has the IDs of the NUMA nodes near the device, ascending. It is nil if the plugin sent no topology, and
	// empty if it sent one without nodes.
	NUMA []int
}

// MaxUID is the longest UID of a pod, in bytes, the same as for its name. Kubernetes has no limit for UIDs.
const MaxUID = 253

// Pod has what the device manager needs of a v1.Pod.
type Pod struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// InitContainers run one after the other before Containers. Both are in the order of the manifest.
	InitContainers []Container `json:"initContainers,omitempty"`
	Containers     []Container `json:"containers"`
	// Among are the IDs of the devices from which the pod's are chosen. If it is nil, they are chosen from all.
	Among []string `json:"-"`
	// Unhealthy means that devices of Among may be chosen that are not healthy.
	Unhealthy bool `json:"-"`
}

// AllContainers returns the init containers and then the other containers. They get their devices in this order.
func (p Pod) AllContainers() []Container { return slices.Concat(p.InitContainers, p.Containers) }

// Container is a container of a pod.
type Container struct {
	Name string `json:"name"`
	// Limits are the numbers of devices by extended resource.
	Limits map[string]int `json:"limits,omitempty"`
	// Sidecar is an init container with the restart policy Always: it runs beside the pod's containers.
	Sidecar bool `json:"sidecar,omitempty"`
}

// Placement is an admitted pod, with its allocations.
type Placement struct {
	Pod Pod `json:"pod"`
	// Allocations are in the order in which they were made.
	Allocations []Allocation `json:"allocations"`
	// Ended are the names of the containers that have ended for good, so that other containers can get their devices.
	Ended    []string  `json:"ended,omitempty"`
	Admitted time.Time `json:"admitted"`
	Caller   Caller    `json:"caller"`
	// Lease is set if a process has the devices, and nil for a pod of a manifest.
	Lease *Lease `json:"lease,omitempty"`
}

// Lease is a placement that ends with a process.
type Lease struct {
	Process Process `json:"process"`
	Command string  `json:"command"` // of the process, as people know it
	// Begins is when the devices were given, in nanoseconds since the boot.
	Begins time.Duration `json:"begins"`
	// Ends is when the process is ended, in nanoseconds since the boot. It is 0 if there is no limit. Changes of the clock
	// do not move it.
	Ends time.Duration `json:"ends,omitempty"`
	// Passed means that earlier requests wait for the devices, and could not have had them before the lease ends.
	Passed bool `json:"passed,omitempty"`
	// Containers means that the process may start containers, which may outlive it.
	Containers bool `json:"containers,omitempty"`
	// InContainer means that the process is in a container of the lease, which has outlived the first process.
	InContainer bool `json:"inContainer,omitempty"`
}

// Process identifies a process. No other process has the same values, before or after it.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks since the boot
	Boot  string `json:"boot"`  // the kernel's boot ID
}

// Held returns the allocations of the containers that have not ended for good.
func (p Placement) Held() []Allocation {
	return slices.DeleteFunc(slices.Clone(p.Allocations), func(a Allocation) bool {
		return slices.Contains(p.Ended, a.Container)
	})
}

// Runs reports whether a container of the pod may still run. An imported pod has no containers, and may run.
func (p Placement) Runs() bool {
	all := p.Pod.AllContainers()
	return len(all) == 0 || slices.ContainsFunc(all, func(c Container) bool { return !slices.Contains(p.Ended, c.Name) })
}

// Allocation has a container's devices of one resource.
type Allocation struct {
	Container string `json:"container"`
	Resource  string `json:"resource"`
	// IDs are the devices, sorted.
	IDs []string `json:"ids"`
	// NUMA has the NUMA nodes of the devices, by ID. Devices that had none when they were allocated are left out.
	NUMA map[string][]int `json:"numa,omitempty"`
	// Response is the plugin's ContainerAllocateResponse, in the encoding of protobuf.
	Response []byte `json:"response,omitempty"`
}

// Caller is the process that sent a request on a unix socket, as the kernel reports it.
type Caller struct {
	UID int `json:"uid"`
	GID int `json:"gid"`
	PID int `json:"pid"`
}

// RunOptions are what a container runtime must give a container, besides what is in the manifest. All lists are
// sorted, except CDIDevices, which are in the order of the plugins' responses.
type RunOptions struct {
	Envs        map[string]string `json:"envs,omitempty"`
	Mounts      []Mount           `json:"mounts,omitempty"`
	Devices     []DeviceNode      `json:"devices,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// CDIDevices are fully qualified CDI names, like nvidia.com/gpu=0.
	CDIDevices []string `json:"cdiDevices,omitempty"`
	// Conflicts are sentences about settings that two resources make differently. The first resource by name counts.
	Conflicts []string `json:"conflicts,omitempty"`
}

// Mount is a bind mount of a file or directory of the host.
type Mount struct {
	ContainerPath string `json:"containerPath"`
	HostPath      string `json:"hostPath"`
	ReadOnly      bool   `json:"readOnly,omitempty"`
}

// DeviceNode is a device node of the host in a container.
type DeviceNode struct {
	ContainerPath string `json:"containerPath"`
	HostPath      string `json:"hostPath"`
	// Permissions are one or more of r, w and m (mknod), as the plugin sent them.
	Permissions string `json:"permissions,omitempty"`
}
