package manager

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// acquire takes a lock, which is a channel with room for one element. The function unlock releases the lock.
func acquire(ctx context.Context, lock chan struct{}) (unlock func(), err error) {
	select {
	case lock <- struct{}{}:
		return func() { <-lock }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// lockPod locks a pod, so that only one call at a time changes it.
func (m *Manager) lockPod(ctx context.Context, uid string) (unlock func(), err error) {
	for {
		m.mu.Lock()
		busy, ok := m.busy[uid]
		if !ok {
			done := make(chan struct{})
			m.busy[uid] = done
			m.mu.Unlock()
			return func() {
				m.mu.Lock()
				defer m.mu.Unlock()
				delete(m.busy, uid)
				close(done)
			}, nil
		}
		m.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another request for pod %q: %w", uid, context.Cause(ctx))
		}
	}
}

// lockResources locks resources, so that only one admission at a time chooses devices of each. It takes the locks in
// the order of the names, so that admissions cannot deadlock.
func (m *Manager) lockResources(ctx context.Context, names map[string]bool) (unlock func(), err error) {
	var unlocks []func()
	unlock = func() {
		for _, u := range unlocks {
			u()
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		m.mu.Lock()
		pool := m.pools[name]
		m.mu.Unlock()
		u, err := acquire(ctx, pool.admitting)
		if err != nil {
			unlock()
			return nil, fmt.Errorf("wait for another admission that takes devices of %s: %w", name, err)
		}
		unlocks = append(unlocks, u)
	}
	return unlock, nil
}
