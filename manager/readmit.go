package manager

import (
	"fmt"
	"maps"
	"slices"

	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/model"
)

// readmit returns the placement of a pod that is placed already.
func (m *Manager) readmit(have model.Placement, p model.Pod) (model.Placement, error) {
	if err := sameRequest(have.Pod, p); err != nil {
		rejected := unexpected(err)
		rejected.Err = fmt.Errorf("%w: %w", ErrConflict, err)
		return model.Placement{}, rejected
	}
	if imported(have.Pod) {
		return m.adopt(have, p)
	}
	return have, nil
}

// imported reports whether a pod comes from a kubelet's checkpoint. A checkpoint has neither the names of pods nor
// containers without devices.
func imported(p model.Pod) bool { return p.Namespace == "" && p.Name == "" }

// adopt completes an imported pod with what the request says about it.
func (m *Manager) adopt(have model.Placement, p model.Pod) (model.Placement, error) {
	have.Pod = p
	if err := m.store.Put(have); err != nil {
		return model.Placement{}, m.unwritten(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	pod := m.pods[p.UID]
	pod.Placement = have
	m.pods[p.UID] = pod
	m.publish(Event{Type: PodAdmitted, Placement: &have})
	return have, nil
}

// sameRequest returns an error if a request is not the one for which the pod was placed. Where the kubelet has a text
// for this, the error has that text.
func sameRequest(have, p model.Pod) error {
	other := fmt.Errorf("pod %q is placed with another name or other containers", p.UID)
	if !imported(have) && !sameContainers(have, p) {
		return other
	}
	limits := map[string]map[string]int{}
	for _, c := range have.AllContainers() {
		limits[c.Name] = c.Limits
	}
	for _, c := range p.AllContainers() {
		before := limits[c.Name]
		delete(limits, c.Name)
		both := slices.Concat(slices.Collect(maps.Keys(before)), slices.Collect(maps.Keys(c.Limits)))
		for _, resource := range slices.Sorted(slices.Values(both)) {
			if from, to := before[resource], c.Limits[resource]; from != to {
				return admission.ChangedError(p.UID, c.Name, resource, from, to)
			}
		}
	}
	if len(limits) > 0 {
		return other
	}
	return nil
}

// sameContainers reports whether two pods have the same name, and the same containers and sidecars.
func sameContainers(a, b model.Pod) bool {
	same := func(a, b model.Container) bool { return a.Name == b.Name && a.Sidecar == b.Sidecar }
	return a.Namespace == b.Namespace && a.Name == b.Name &&
		slices.EqualFunc(a.InitContainers, b.InitContainers, same) &&
		slices.EqualFunc(a.Containers, b.Containers, same)
}
