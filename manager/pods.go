package manager

import (
	"cmp"
	"maps"
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// Pods returns the placed pods in the order of their admission. The caller must not modify their contents.
func (m *Manager) Pods() []model.Placement {
	m.mu.Lock()
	pods := slices.Collect(maps.Values(m.pods))
	m.mu.Unlock()
	slices.SortFunc(pods, func(a, b placed) int { return cmp.Compare(a.number, b.number) })
	placements := make([]model.Placement, len(pods))
	for i, p := range pods {
		placements[i] = p.Placement
	}
	return placements
}

// Pod returns a placed pod.
func (m *Manager) Pod(podUID string) (model.Placement, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, ok := m.pods[podUID]
	return p.Placement, ok
}
