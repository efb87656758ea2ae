package manager

import (
	"maps"
	"slices"
)

// Resource is a resource with its devices.
type Resource struct {
	Name string `json:"name"`
	// Connected reports whether the resource's plugin is connected.
	Connected bool `json:"connected"`
	// Capacity is the number of devices that the plugin lists, and Allocatable the number of those that are healthy
	// and not withheld. Both include devices that pods hold, like in the status of a Node.
	Capacity    int `json:"capacity"`
	Allocatable int `json:"allocatable"`
	// Devices are the devices that the plugin lists and those that pods hold, sorted by ID.
	Devices []Device `json:"devices"`
}

// Device is a device of a resource.
type Device struct {
	ID     string `json:"id"`
	Health Health `json:"health"`
	// NUMA has the NUMA nodes near the device. It is nil if the plugin sent no topology.
	NUMA []int `json:"numa,omitempty"`
	// Pod is the UID of the pod that holds the device, or empty. Containers are its containers that share the device.
	Pod        string   `json:"pod,omitempty"`
	Containers []string `json:"containers,omitempty"`
	// Withheld reports whether the device may belong to a pod whose placement was lost because the state was damaged.
	// See Free.
	Withheld bool `json:"withheld,omitempty"`
}

// Count has the numbers of a resource's devices, like in the status of a Node.
type Count struct {
	Capacity    int `json:"capacity"`
	Allocatable int `json:"allocatable"`
}

// Resources returns all resources, sorted by name: those with a plugin or in their grace period, and those of which a
// pod holds a device.
func (m *Manager) Resources() []Resource {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Resource
	for _, name := range slices.Sorted(maps.Keys(m.pools)) {
		pool := m.pools[name]
		if !pool.known() {
			continue
		}
		listed, count := pool.Listed(), pool.count()
		status := Resource{
			Name: name, Connected: listed.Connected,
			Capacity: count.Capacity, Allocatable: count.Allocatable, Devices: []Device{},
		}
		for _, s := range pool.States() {
			status.Devices = append(status.Devices, Device{
				ID: s.ID, Health: health(listed, pool.Device(s.ID)), NUMA: s.NUMA,
				Pod: s.Pod, Containers: s.Containers, Withheld: s.Withheld,
			})
		}
		all = append(all, status)
	}
	return all
}

// Counts returns the numbers of devices by resource. A resource that was removed stays, with 0 devices, since the
// status of a Node must have it.
func (m *Manager) Counts() map[string]Count {
	m.mu.Lock()
	defer m.mu.Unlock()
	counts := make(map[string]Count, len(m.pools))
	for name, pool := range m.pools {
		counts[name] = pool.count()
	}
	return counts
}
