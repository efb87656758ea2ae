package manager

import (
	"slices"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

// restore restores the loaded state. Pods hold their devices, by ID, even before a plugin has registered again. Until
// then the resources have no devices.
func (m *Manager) restore(loaded state.Loaded) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range loaded.Resources {
		m.pool(name).Set(model.Resource{Name: name})
	}
	for _, p := range loaded.Placements {
		m.holdAll(p)
		m.admitted++
		m.pods[p.Pod.UID] = placed{Placement: p, number: m.admitted}
	}
	if m.loss != nil {
		m.o.Log.Error("devices are withheld from new pods: they may belong to pods of lost placements; check which pods "+
			"run, then free devices with: release --withheld", "reason", m.loss.Reason, "file", m.loss.File)
	}
}

// holdAll lets a pod hold the devices of its containers that have not ended. The caller holds m.mu.
func (m *Manager) holdAll(p model.Placement) {
	for _, a := range p.Allocations {
		pool := m.pool(a.Resource) // also for a container that has ended: Release needs the pool
		if slices.Contains(p.Ended, a.Container) {
			continue
		}
		pool.Hold(p.Pod.UID, a.Container, a.IDs)
	}
}
