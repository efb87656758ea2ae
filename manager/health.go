package manager

import (
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// Health is the health of a device.
type Health string

const (
	// Healthy is the health of a device that its plugin reports as healthy.
	Healthy Health = "Healthy"
	// Unhealthy is the health of a device that its plugin reports with any other value.
	Unhealthy Health = "Unhealthy"
	// Unknown is the health of a device that its plugin no longer lists, or whose plugin is disconnected.
	Unknown Health = "Unknown"
)

// changed sets a resource to what its plugin lists now. A change of health is not written to the state, so the cost is
// one pass over the devices.
func (m *Manager) changed(next model.Resource) {
	m.mu.Lock()
	pool := m.pool(next.Name)
	before, registered := pool.Listed(), pool.Registered()
	pool.Set(next)
	m.publishResource(ResourceChanged, pool, before)
	m.mu.Unlock()
	if !registered {
		m.recordResources()
	}
}

// removed is called when the grace period of a resource has ended.
func (m *Manager) removed(name string) {
	m.o.Observer.Removed(name)
	m.mu.Lock()
	pool := m.pool(name)
	before := pool.Listed()
	pool.Expire()
	m.publishResource(ResourceRemoved, pool, before)
	m.mu.Unlock()
	m.recordResources()
}

// publishResource publishes the events of a resource that has changed. The caller holds m.mu.
func (m *Manager) publishResource(t EventType, pool *pool, before model.Resource) {
	count := pool.count()
	m.publish(Event{Type: t, Resource: before.Name, Count: count})
	if devices := flipped(pool, before); len(devices) > 0 {
		m.publish(Event{Type: HealthChanged, Resource: before.Name, Count: count, Devices: devices})
	}
}

// flipped returns the held devices of a resource whose health has changed, sorted by ID. It merges the sorted lists
// from before and after the change.
func flipped(pool *pool, before model.Resource) []PodDevice {
	var flipped []PodDevice
	compare := func(id string, old, now Health) {
		if old == now {
			return
		}
		if pod, _ := pool.Holder(id); pod != "" {
			flipped = append(flipped, PodDevice{ID: id, Pod: pod, Health: now})
		}
	}
	after := pool.Listed()
	old, now := before.Devices, after.Devices
	for len(old) > 0 || len(now) > 0 {
		switch {
		case len(now) == 0 || len(old) > 0 && old[0].ID < now[0].ID:
			compare(old[0].ID, health(before, &old[0]), health(after, nil))
			old = old[1:]
		case len(old) == 0 || now[0].ID < old[0].ID:
			compare(now[0].ID, health(before, nil), health(after, &now[0]))
			now = now[1:]
		default:
			compare(now[0].ID, health(before, &old[0]), health(after, &now[0]))
			old, now = old[1:], now[1:]
		}
	}
	return flipped
}

// health returns the health of a device. If the plugin does not list the device, d is nil.
func health(r model.Resource, d *model.Device) Health {
	switch {
	case d == nil || !r.Connected:
		return Unknown
	case d.Healthy:
		return Healthy
	}
	return Unhealthy
}

// DeviceHealth returns the health of devices of a resource, in the order of ids. If the resource is unknown, its
// devices count as devices whose plugin is disconnected.
func (m *Manager) DeviceHealth(resource string, ids []string) []Health {
	m.mu.Lock()
	defer m.mu.Unlock()
	pool := m.pools[resource]
	if pool == nil {
		return slices.Repeat([]Health{health(model.Resource{}, nil)}, len(ids))
	}
	listed := pool.Listed()
	all := make([]Health, len(ids))
	for i, id := range ids {
		all[i] = health(listed, pool.Device(id))
	}
	return all
}

// recordResources stores the names of the resources that have a plugin. After a restart these have 0 devices in the
// status of a Node until their plugins register again.
func (m *Manager) recordResources() {
	m.recording.Lock() // the last write has the newest names
	defer m.recording.Unlock()
	m.mu.Lock()
	var names []string
	for name, pool := range m.pools {
		if pool.Registered() {
			names = append(names, name)
		}
	}
	m.mu.Unlock()
	slices.Sort(names)
	if err := m.store.SetResources(names); err != nil {
		m.o.Log.Error("the names of the resources cannot be written: a restart will not know those whose plugins are "+
			"disconnected",
			"error", err)
	}
}
