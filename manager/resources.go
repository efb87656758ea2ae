package manager

import (
	"maps"
	"slices"
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
type Count struct {
	Capacity    int `json:"capacity"`
	Allocatable int `json:"allocatable"`
}

// Resources returns all resources, sorted by name: those that plugins offer, those whose plugin is away and has not
// been away for too long, and those of which a pod holds a device.
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

// Counts returns the capacity and the allocatable devices by resource. A resource that was removed is 0 and stays: a
// Node's status must say so.
func (m *Manager) Counts() map[string]Count {
	m.mu.Lock()
	defer m.mu.Unlock()
	counts := make(map[string]Count, len(m.pools))
	for name, pool := range m.pools {
		counts[name] = pool.count()
	}
	return counts
}
