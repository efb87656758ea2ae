// Package model has the values that the device manager works with: resources and their devices as plugins list them,
// pods as manifests describe them, and what containers were given. It is pure.
package model

import (
	"slices"
	"time"
)

// Resource is what a plugin offers under a name.
type Resource struct {
	// Name is the extended resource's name, as nvidia.com/gpu.
	Name string
	// Devices are sorted by ID, and no two have the same ID.
	Devices []Device
	// Connected is whether the plugin's ListAndWatch stream is open. Without it no device is healthy.
	Connected bool
}

// Device is one device as its plugin listed it.
type Device struct {
	ID      string
	Healthy bool
	// NUMA has the IDs of the NUMA nodes that the device is close to, ascending. It is nil if the plugin sent no
	// topology, and empty if it sent one without nodes.
	NUMA []int
}

// MaxUID is how long a pod's UID may be in bytes: as long as its name. Kubernetes has no limit of its own for UIDs.
const MaxUID = 253

// Pod is what the device manager needs of a v1.Pod.
type Pod struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// InitContainers run one after the other before Containers. Both are in the order of the manifest.
	InitContainers []Container `json:"initContainers,omitempty"`
	Containers     []Container `json:"containers"`
}

// AllContainers returns the init containers, then the containers: the order in which they get their devices.
func (p Pod) AllContainers() []Container { return slices.Concat(p.InitContainers, p.Containers) }

// Container is a container of a pod.
type Container struct {
	Name string `json:"name"`
	// Limits are the numbers of devices by the name of the extended resource.
	Limits map[string]int `json:"limits,omitempty"`
	// Sidecar is an init container with the restart policy Always: it runs beside the pod's containers.
	Sidecar bool `json:"sidecar,omitempty"`
}

// Placement is a pod that was admitted, with what its containers were given.
type Placement struct {
	Pod Pod `json:"pod"`
	// Allocations are in the order in which they were made.
	Allocations []Allocation `json:"allocations"`
	// Ended are the names of the containers that have ended for good: their devices can be given to others.
	Ended    []string  `json:"ended,omitempty"`
	Admitted time.Time `json:"admitted"`
	Caller   Caller    `json:"caller"`
}

// Held are the allocations of the containers that have not ended for good.
func (p Placement) Held() []Allocation {
	return slices.DeleteFunc(slices.Clone(p.Allocations), func(a Allocation) bool {
		return slices.Contains(p.Ended, a.Container)
	})
}

// Allocation is what one container has of one resource.
type Allocation struct {
	Container string `json:"container"`
	Resource  string `json:"resource"`
	// IDs are the devices, sorted.
	IDs []string `json:"ids"`
	// NUMA has the NUMA nodes of each device that had any when it was allocated.
	NUMA map[string][]int `json:"numa,omitempty"`
	// Response is the plugin's ContainerAllocateResponse, in the encoding of protobuf.
	Response []byte `json:"response,omitempty"`
}

// Caller is the process that asked for something at a unix socket, by the credentials that the kernel reports.
type Caller struct {
	UID int `json:"uid"`
	GID int `json:"gid"`
	PID int `json:"pid"`
}

// RunOptions are what a container runtime gives a container besides what its manifest says. All lists are sorted, but
// CDIDevices, which is in the order of the plugins' answers.
type RunOptions struct {
	Envs        map[string]string `json:"envs,omitempty"`
	Mounts      []Mount           `json:"mounts,omitempty"`
	Devices     []DeviceNode      `json:"devices,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// CDIDevices are fully qualified CDI names, as nvidia.com/gpu=0.
	CDIDevices []string `json:"cdiDevices,omitempty"`
	// Conflicts are sentences about settings that two resources make differently. The first resource wins, in the
	// order of their names.
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
	// Permissions are some of r, w and m (mknod), as the plugin sent them.
	Permissions string `json:"permissions,omitempty"`
}
