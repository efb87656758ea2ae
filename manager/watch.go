package manager

import (
	"context"

	"gpu-cdi-plugin/manager/model"
)

// EventType says what an event is about.
type EventType string

// The types of events.
const (
	PodAdmitted     EventType = "Admitted"
	PodReleased     EventType = "Released"
	ContainerEnded  EventType = "Ended"
	ResourceChanged EventType = "Resource" // its devices, their health, or whether its plugin is connected
	ResourceRemoved EventType = "Removed"  // its plugin was away for too long
	HealthChanged   EventType = "Health"   // that of devices which pods hold
)

// Event is a change. What it points to is not to be modified.
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

// watchQueue is how many events a watcher may be behind.
const watchQueue = 1024

// Watch sends each change from now on, until ctx ends. If the channel is closed before, the receiver was too slow and
// changes are missing, or the manager has ended: the receiver lists and watches again.
func (m *Manager) Watch(ctx context.Context) <-chan Event {
	events := make(chan Event, watchQueue)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.open() != nil {
		close(events)
		return events
	}
	m.watchers[events] = context.AfterFunc(ctx, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.unwatch(events)
	})
	return events
}

// publish sends an event to all watchers. It never waits: m.mu is held.
func (m *Manager) publish(e Event) {
	for events := range m.watchers {
		select {
		case events <- e:
		default:
			m.unwatch(events)
		}
	}
}

// unwatch closes a watcher's channel, if that has not happened yet. m.mu is held.
func (m *Manager) unwatch(events chan Event) {
	if stop, ok := m.watchers[events]; ok {
		stop()
		delete(m.watchers, events)
		close(events)
	}
}
