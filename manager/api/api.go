// Package api is the device manager's local API, HTTP with JSON on a unix socket: the server and the client.
// specs/manager.openapi.yaml documents each request and response.
//
// A pod is given as a manifest, a v1.Pod. Responses have the shapes and names of Kubernetes where it has such: the
// metadata of a pod, the devices of a container as in the PodResources service, the capacity and allocatable resources
// of a v1.NodeStatus, and the reasons in the status of a rejected pod.
//
// Whoever may connect to the socket, by its owner and group, may make every request. The process that admitted a pod
// is recorded with the placement.
package api

import (
	"context"
	"slices"
	"time"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

// Manager has the methods of the device manager that the API needs. See manager.Manager.
type Manager interface {
	Check() error
	Admit(ctx context.Context, p model.Pod, by model.Caller) (model.Placement, error)
	Start(ctx context.Context, podUID, container string) (model.RunOptions, error)
	Ended(ctx context.Context, podUID, container string) error
	Release(ctx context.Context, podUID string) error
	Pods() []model.Placement
	Pod(podUID string) (model.Placement, bool)
	Resources() []manager.Resource
	DeviceHealth(resource string, ids []string) []manager.Health
	Withheld() *state.Loss
	Free(ctx context.Context, resource string, ids []string) error
	FreeAll(ctx context.Context) error
	Watch(ctx context.Context) <-chan manager.Event
}

// Pod is a placed pod.
type Pod struct {
	Metadata Metadata `json:"metadata"`
	// InitContainers and Containers are all containers of the manifest, in the same order.
	InitContainers []Container `json:"initContainers,omitempty"`
	Containers     []Container `json:"containers"`
	// Caller is the process that admitted the pod.
	Caller model.Caller `json:"caller"`
}

// Metadata identifies a pod.
type Metadata struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	UID       string `json:"uid"`
	// CreationTimestamp is the time of the admission.
	CreationTimestamp time.Time `json:"creationTimestamp"`
}

// Container is a container of a placed pod.
type Container struct {
	Name string `json:"name"`
	// RestartPolicy is Always for a sidecar: an init container that keeps running beside the pod's containers.
	RestartPolicy string `json:"restartPolicy,omitempty"`
	// Ended reports whether the container has ended for good.
	Ended   bool               `json:"ended,omitempty"`
	Devices []ContainerDevices `json:"devices,omitempty"`
	// AllocatedResourcesStatus is the present health of Devices, as in a v1.ContainerStatus. It is empty if the
	// container has ended, since other pods can have its devices.
	AllocatedResourcesStatus []ResourceStatus `json:"allocatedResourcesStatus,omitempty"`
}

// ContainerDevices are a container's devices of one resource.
type ContainerDevices struct {
	ResourceName string   `json:"resourceName"`
	DeviceIDs    []string `json:"deviceIds"`
}

// ResourceStatus has the health of a container's devices of one resource.
type ResourceStatus struct {
	// Name is the name of the resource.
	Name      string           `json:"name"`
	Resources []ResourceHealth `json:"resources"`
}

// ResourceHealth is the health of a device.
type ResourceHealth struct {
	ResourceID string         `json:"resourceID"`
	Health     manager.Health `json:"health"`
}

// PodList is the response to a list of pods.
type PodList struct {
	// Items are in the order of admission.
	Items []Pod `json:"items"`
}

// ResourceList is the response to a list of devices.
type ResourceList struct {
	// Items are sorted by the name of the resource.
	Items []manager.Resource `json:"items"`
	// Withheld says why devices are withheld; nil means that none are.
	Withheld *state.Loss `json:"withheld,omitempty"`
}

// NodeStatus is the part of a v1.NodeStatus about resources. The values are quantities.
type NodeStatus struct {
	Capacity    map[string]string `json:"capacity"`
	Allocatable map[string]string `json:"allocatable"`
}

// FreeRequest names withheld devices that no container uses.
type FreeRequest struct {
	// ResourceName is the resource to which DeviceIDs belong.
	ResourceName string   `json:"resourceName,omitempty"`
	DeviceIDs    []string `json:"deviceIds,omitempty"`
	// All means all withheld devices of all resources.
	All bool `json:"all,omitempty"`
}

// Event is a change, or the error that ends a watch.
type Event struct {
	// Type is the type of a manager.Event, or ErrorEvent.
	Type manager.EventType `json:"type"`
	// Pod is the pod after the change, for the types Admitted, Released and Ended.
	Pod *Pod `json:"pod,omitempty"`
	// Resource has the numbers of a resource's devices after the resource has changed or was removed.
	Resource *ResourceCount `json:"resource,omitempty"`
	// Devices are the devices whose health has changed.
	Devices []manager.PodDevice `json:"devices,omitempty"`
	// Error says why the server ends the watch. Only an ErrorEvent has it.
	Error string `json:"error,omitempty"`
}

// ResourceCount has the numbers of a resource's devices.
type ResourceCount struct {
	Name        string `json:"name"`
	Capacity    int    `json:"capacity"`
	Allocatable int    `json:"allocatable"`
}

// ErrorEvent is the type of the last event of a watch that the server ends, because the client was too slow and missed
// changes, or because the manager ends. The text is in Event.Error; the client should list and watch again. If the
// connection breaks, a watch ends without this event.
const ErrorEvent manager.EventType = "Error"

// podOf converts a placement.
func (s *Server) podOf(p model.Placement) Pod {
	pod := Pod{
		Metadata: Metadata{
			Name: p.Pod.Name, Namespace: p.Pod.Namespace, UID: p.Pod.UID, CreationTimestamp: p.Admitted,
		},
		Containers: []Container{},
		Caller:     p.Caller,
	}
	for _, c := range p.Pod.InitContainers {
		pod.InitContainers = append(pod.InitContainers, s.containerOf(p, c))
	}
	for _, c := range p.Pod.Containers {
		pod.Containers = append(pod.Containers, s.containerOf(p, c))
	}
	return pod
}

// containerOf converts a container of a placement.
func (s *Server) containerOf(p model.Placement, c model.Container) Container {
	shown := Container{Name: c.Name, Ended: slices.Contains(p.Ended, c.Name)}
	if c.Sidecar {
		shown.RestartPolicy = "Always"
	}
	for _, a := range p.Allocations {
		if a.Container != c.Name {
			continue
		}
		shown.Devices = append(shown.Devices, ContainerDevices{a.Resource, a.IDs})
		if !shown.Ended {
			shown.AllocatedResourcesStatus = append(shown.AllocatedResourcesStatus, s.statusOf(a))
		}
	}
	return shown
}

// statusOf returns the health of the devices of an allocation.
func (s *Server) statusOf(a model.Allocation) ResourceStatus {
	status := ResourceStatus{Name: a.Resource, Resources: []ResourceHealth{}}
	for i, health := range s.Manager.DeviceHealth(a.Resource, a.IDs) {
		status.Resources = append(status.Resources, ResourceHealth{ResourceID: a.IDs[i], Health: health})
	}
	return status
}

// eventOf converts an event.
func (s *Server) eventOf(e manager.Event) Event {
	shown := Event{Type: e.Type, Devices: e.Devices}
	if e.Resource != "" {
		shown.Resource = &ResourceCount{e.Resource, e.Count.Capacity, e.Count.Allocatable}
	}
	if e.Placement != nil {
		shown.Pod = new(s.podOf(*e.Placement))
	}
	if e.Type == manager.PodReleased { // another pod may have the devices by now
		for _, containers := range [][]Container{shown.Pod.InitContainers, shown.Pod.Containers} {
			for i := range containers {
				containers[i].AllocatedResourcesStatus = nil
			}
		}
	}
	return shown
}
