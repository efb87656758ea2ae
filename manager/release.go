package manager

import (
	"context"
	"fmt"
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// Ended records that a container has ended for good, like an init container that has succeeded. Devices that no other
// container of the pod has become free. A second call for the same container changes nothing.
//
// Errors: ErrNotFound, ErrRetry, and the context's.
func (m *Manager) Ended(ctx context.Context, podUID, container string) error {
	unlock, p, err := m.lockPlaced(ctx, podUID, container)
	if err != nil {
		return err
	}
	defer unlock()
	if slices.Contains(p.Ended, container) {
		return nil
	}
	p.Ended = append(slices.Clip(p.Ended), container)
	if err := m.store.Put(p); err != nil {
		return m.unwritten(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	pod := m.pods[podUID]
	pod.Placement = p
	m.pods[podUID] = pod
	m.releaseAll(podUID, allocationsOf(p, container))
	m.publish(Event{Type: ContainerEnded, Placement: &p})
	return nil
}

// ChangeLease changes the lease of a pod by a function, whose error leaves it as it is.
//
// Errors: that of the function, ErrNotFound, ErrConflict (it is no lease), ErrRetry, and the context's.
func (m *Manager) ChangeLease(ctx context.Context, podUID string, change func(*model.Lease) error) error {
	unlock, p, err := m.lockPlaced(ctx, podUID, "")
	if err != nil {
		return err
	}
	defer unlock()
	if p.Lease == nil {
		return fmt.Errorf("pod %q is no lease: %w", podUID, ErrConflict)
	}
	lease := *p.Lease
	if err := change(&lease); err != nil {
		return err
	}
	p.Lease = &lease
	if err := m.store.Put(p); err != nil {
		return m.unwritten(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	pod := m.pods[podUID]
	pod.Placement = p
	m.pods[podUID] = pod
	return nil
}

// Release releases a pod's devices and forgets the pod. If another call for the pod is running, Release waits until
// that has ended.
//
// Errors: ErrNotFound, ErrRetry, and the context's.
func (m *Manager) Release(ctx context.Context, podUID string) error {
	unlock, p, err := m.lockPlaced(ctx, podUID, "")
	if err != nil {
		return err
	}
	defer unlock()

	// The placement is deleted first, so that after a crash no device belongs to two pods.
	if err := m.store.Delete(podUID); err != nil {
		return m.unwritten(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.pods, podUID)
	m.releaseAll(podUID, p.Allocations)
	m.publish(Event{Type: PodReleased, Placement: &p})
	return nil
}

// releaseAll releases devices of a pod. The caller holds m.mu.
func (m *Manager) releaseAll(uid string, allocations []model.Allocation) {
	for _, a := range allocations {
		m.pools[a.Resource].Release(uid, a.Container, a.IDs)
	}
}

// lockPlaced locks a pod and returns its placement. If container is not empty, the pod must have that container.
func (m *Manager) lockPlaced(ctx context.Context, uid, container string) (func(), model.Placement, error) {
	if err := m.open(); err != nil {
		return nil, model.Placement{}, err
	}
	unlock, err := m.lockPod(ctx, uid)
	if err != nil {
		return nil, model.Placement{}, err
	}
	p, ok := m.Pod(uid)
	if !ok {
		unlock()
		return nil, model.Placement{}, fmt.Errorf("pod %q: %w", uid, ErrNotFound)
	}
	named := func(c model.Container) bool { return c.Name == container }
	if container != "" && !slices.ContainsFunc(p.Pod.AllContainers(), named) {
		unlock()
		return nil, model.Placement{}, fmt.Errorf("container %q of pod %q: %w", container, uid, ErrNotFound)
	}
	return unlock, p, nil
}
