package manager

import (
	"context"
	"errors"
)

// Health is the health of a device.
type Health string

const (
	Healthy   Health = "Healthy"
	Unhealthy Health = "Unhealthy"
	// Unknown is the health of a device that its plugin no longer lists, or whose plugin is away.
	Unknown Health = "Unknown"
)

// Resource is a resource with its devices.
type Resource struct {
	Name string `json:"name"`
	// Connected is whether the resource's plugin is connected.
	Connected bool `json:"connected"`
	// Capacity is the number of devices that the plugin lists, Allocatable that of the healthy ones that are not
	// withheld. Devices that pods hold count in both, as in a Node's status.
	Capacity    int `json:"capacity"`
	Allocatable int `json:"allocatable"`
	// Devices are those that the plugin lists, and those that pods hold without being listed. They are sorted by ID.
	Devices []Device `json:"devices"`
}

// Device is a device of a resource.
type Device struct {
	ID     string `json:"id"`
	Health Health `json:"health"`
	// NUMA has the NUMA nodes that the device is close to. It is nil if the plugin sent no topology.
	NUMA []int `json:"numa,omitempty"`
	// Pod is the UID of the pod that holds the device, or empty, and Containers are those that share it.
	Pod        string   `json:"pod,omitempty"`
	Containers []string `json:"containers,omitempty"`
	// Withheld is whether the device may belong to a pod of which a damaged state knows nothing. See Free.
	Withheld bool `json:"withheld,omitempty"`
}

// Count is what a Node's status has of a resource.
type Count struct{ Capacity, Allocatable int }

// Resources returns all resources, sorted by name: those that plugins offer, those whose plugin is away and has not
// been away for too long, and those of which a pod holds a device.
func (m *Manager) Resources() []Resource { return nil }

// Counts returns the capacity and the allocatable devices by resource. A resource that was removed is 0 and stays: a
// Node's status must say so.
func (m *Manager) Counts() map[string]Count { return nil }

// Withheld returns why devices are withheld, or nil if none are.
func (m *Manager) Withheld() *Loss { return nil }

// Free says that no container uses these withheld devices of a resource: they can be given to pods again. FreeAll says
// it of all devices. An ID that is not withheld changes nothing.
func (m *Manager) Free(ctx context.Context, resource string, ids []string) error {
	return errors.ErrUnsupported
}

// FreeAll ends the withholding.
func (m *Manager) FreeAll(ctx context.Context) error { return errors.ErrUnsupported }
