package manager

import (
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// Health is the health of a device.
type Health string

const (
	// Healthy is as the plugin says.
	Healthy Health = "Healthy"
	// Unhealthy is everything else that a plugin says.
	Unhealthy Health = "Unhealthy"
	// Unknown is the health of a device that its plugin no longer lists, or whose plugin is away.
	Unknown Health = "Unknown"
)

// changed takes a resource as its plugin lists it now. Nothing is written for a change of health: its cost is that of
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

// removed takes that a resource's plugin was away for too long.
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

// publishResource sends the events of a resource that has changed. m.mu is held.
func (m *Manager) publishResource(t EventType, pool *pool, before model.Resource) {
	count := pool.count()
	m.publish(Event{Type: t, Resource: before.Name, Count: count})
	if devices := flipped(pool, before); len(devices) > 0 {
		m.publish(Event{Type: HealthChanged, Resource: before.Name, Count: count, Devices: devices})
	}
}

// flipped returns the devices of a resource that pods hold and whose health has changed, sorted by ID. It walks through
// the lists before and after the change at the same time.
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

// health returns the health of a device of a resource, nil for one that is not listed.
func health(r model.Resource, d *model.Device) Health {
	switch {
	case d == nil || !r.Connected:
		return Unknown
	case d.Healthy:
		return Healthy
	}
	return Unhealthy
}

// DeviceHealth returns the health of devices of a resource, in the order of ids. Those of an unknown resource are like
// those of one whose plugin is away.
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

// recordResources records which resources have a plugin: after a restart they have no devices until it registers again,
// and a Node's status says so.
func (m *Manager) recordResources() {
	m.recording.Lock() // what is written last is the newest
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
		m.o.Log.Error("a restart will not know the resources whose plugins are away: their names cannot be written",
			"error", err)
	}
}
