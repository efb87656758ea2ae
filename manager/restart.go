package manager

import (
	"fmt"
	"slices"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

// restore takes what the state has. Pods hold their devices by ID, before any plugin has registered again; the
// resources of earlier plugins have no devices until then.
func (m *Manager) restore(loaded state.Loaded) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range loaded.Resources {
		m.resource(name).pool.Set(model.Resource{Name: name})
	}
	for _, p := range loaded.Placements {
		if err := m.holdAll(p); err != nil {
			return err
		}
		m.admitted++
		m.pods[p.Pod.UID] = placed{Placement: p, number: m.admitted}
	}
	if m.loss != nil {
		m.o.Log.Error("devices are withheld from new pods: the state of the device manager was damaged, and they may "+
			"belong to pods that it has lost; say which are free when you have looked what runs",
			"reason", m.loss.Reason, "damaged file", m.loss.File)
	}
	return nil
}

// holdAll has a pod hold its devices. m.mu is held.
func (m *Manager) holdAll(p model.Placement) error {
	for _, a := range p.Allocations {
		pool := m.resource(a.Resource).pool // also for a container that has ended: Release frees all that the pod had
		if !m.o.Dialect.ChargesInitDevices && slices.Contains(p.Ended, a.Container) {
			continue
		}
		for _, id := range a.IDs {
			if other, _ := pool.Holder(id); other != "" && other != p.Pod.UID {
				return fmt.Errorf("the state gives device %s of %s to two pods, %q and %q",
					id, a.Resource, other, p.Pod.UID)
			}
		}
		pool.Hold(p.Pod.UID, a.Container, a.IDs)
	}
	return nil
}
