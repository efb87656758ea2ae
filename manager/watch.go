package manager

import (
	"context"

	"gpu-cdi-plugin/manager/model"
)

// EventType is the type of an event.
type EventType string

// The types of events.
const (
	PodAdmitted     EventType = "Admitted"
	PodReleased     EventType = "Released"
	ContainerEnded  EventType = "Ended"
	ResourceChanged EventType = "Resource" // its devices, their health or Connected have changed
	ResourceRemoved EventType = "Removed"  // its grace period has ended
	HealthChanged   EventType = "Health"   // the health of devices that pods hold has changed
)

// Event is a change. The receiver must not modify its contents.
type Event struct {
	Type EventType `json:"type"`
	// Placement is the placed pod after the change, for PodAdmitted, PodReleased and ContainerEnded.
	Placement *model.Placement `json:"placement,omitempty"`
	// Resource is the name of the resource for the other types, and Count its numbers of devices after the change.
	Resource string `json:"resource,omitempty"`
	Count    Count  `json:"count,omitzero"`
	// Devices are the devices whose health has changed, for HealthChanged, sorted by ID.
	Devices []PodDevice `json:"devices,omitempty"`
}

// PodDevice is a device that a pod holds.
type PodDevice struct {
	ID     string `json:"id"`
	Pod    string `json:"pod"` // UID
	Health Health `json:"health"`
}

// watchQueue is how many events may wait for a receiver.
const watchQueue = 1024

// Watch sends each change from now on, until ctx ends. If the channel is closed earlier, the receiver was too slow and
// missed changes, or the manager has ended. The receiver should then list and watch again.
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

// publish sends an event to all watchers. It does not wait for them. The caller holds m.mu.
func (m *Manager) publish(e Event) {
	for events := range m.watchers {
		select {
		case events <- e:
		default:
			m.unwatch(events)
		}
	}
}

// unwatch closes a watcher's channel unless that was done already. The caller holds m.mu.
func (m *Manager) unwatch(events chan Event) {
	if stop, ok := m.watchers[events]; ok {
		stop()
		delete(m.watchers, events)
		close(events)
	}
}
