package manager

import (
	"slices"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

// restore takes what the state has. Pods hold their devices by ID, before any plugin has registered again; the
// resources of earlier plugins have no devices until then.
func (m *Manager) restore(loaded state.Loaded) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range loaded.Resources {
		m.pool(name).Set(model.Resource{Name: name})
	}
	d := m.o.Dialect
	unchecked := d.CrashesOnMissingDevice || d.RejectsAfterInit || d.RejectsWithoutPlugin
	for _, p := range loaded.Placements {
		m.holdAll(p)
		m.admitted++
		m.pods[p.Pod.UID] = placed{Placement: p, number: m.admitted, unchecked: unchecked}
	}
	if d.ChargesInitDevices {
		for _, p := range loaded.Placements {
			m.charge(p)
		}
	}
	if m.loss != nil {
		m.o.Log.Error("devices are withheld from new pods: the state of the device manager was damaged, and they may "+
			"belong to pods that it has lost; say which are free when you have looked what runs",
			"reason", m.loss.Reason, "damaged file", m.loss.File)
	}
}

// holdAll has a pod hold the devices of its containers that have not ended. m.mu is held.
func (m *Manager) holdAll(p model.Placement) {
	for _, a := range p.Allocations {
		pool := m.pool(a.Resource) // also for a container that has ended: Release frees all that the pod had
		if slices.Contains(p.Ended, a.Container) {
			continue
		}
		for _, id := range a.IDs {
			if other, _ := pool.Holder(id); other != "" && other != p.Pod.UID {
				m.o.Log.Error("the state gives a device to two pods: it is held until both are released",
					"resource", a.Resource, "device", id, "pods", []string{other, p.Pod.UID})
			}
		}
		pool.Hold(p.Pod.UID, a.Container, a.IDs)
	}
}

// charge has a pod hold the devices of its containers that have ended: dialect.Dialect.ChargesInitDevices. Another pod
// may have got some of them before, without the dialect. m.mu is held.
func (m *Manager) charge(p model.Placement) {
	for _, a := range p.Allocations {
		if !slices.Contains(p.Ended, a.Container) {
			continue
		}
		pool := m.pools[a.Resource]
		pool.Hold(p.Pod.UID, a.Container, slices.DeleteFunc(slices.Clone(a.IDs), func(id string) bool {
			other, _ := pool.Holder(id)
			return other != "" && other != p.Pod.UID
		}))
	}
}
