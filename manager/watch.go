package manager

import (
	"context"

	"gpu-cdi-plugin/manager/model"
)

// EventType says what an event is about.
type EventType string

const (
	PodAdmitted     EventType = "Admitted"
	PodReleased     EventType = "Released"
	ContainerEnded  EventType = "Ended"
	ResourceChanged EventType = "Resource" // its devices, their health, or whether its plugin is connected
	ResourceRemoved EventType = "Removed"  // its plugin was away for too long
	HealthChanged   EventType = "Health"   // that of devices which pods hold
)

// Event is a change. Its values are not to be modified.
type Event struct {
	Type EventType `json:"type"`
	// Placement is the pod of PodAdmitted, PodReleased and ContainerEnded, after the change.
	Placement *model.Placement `json:"placement,omitempty"`
	// Resource is the name of the resource of the other types, and Count what it has now.
	Resource string `json:"resource,omitempty"`
	Count    Count  `json:"count,omitzero"`
	// Devices are those of HealthChanged, sorted by ID.
	Devices []PodDevice `json:"devices,omitempty"`
}

// PodDevice is a device that a pod holds.
type PodDevice struct {
	ID     string `json:"id"`
	Pod    string `json:"pod"` // UID
	Health Health `json:"health"`
}

// Watch sends each change from now on, until ctx ends. If the channel is closed before, the receiver was too slow and
// changes are missing: it lists and watches again.
func (m *Manager) Watch(ctx context.Context) <-chan Event { return nil }
