package manager

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"gpu-cdi-plugin/manager/state"
)

// Withheld returns why devices are withheld, without those that are free again, or nil if none are withheld. They are
// given to no pod before Free.
func (m *Manager) Withheld() *state.Loss {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loss == nil {
		return nil
	}
	loss := *m.loss
	loss.Cleared = nil
	return &loss
}

// Free says that no container uses these withheld devices of a resource: they can be given to pods again. An ID that is
// not withheld changes nothing. While the resource's plugin is away, as after a restart, its IDs are taken as they are.
//
// Errors: ErrNotFound for an ID that the connected plugin does not list: nothing is freed. ErrRetry, and that of ctx.
func (m *Manager) Free(ctx context.Context, resource string, ids []string) error {
	unlock, err := acquire(ctx, m.clearing)
	if err != nil {
		return err
	}
	defer unlock()
	m.mu.Lock()
	loss := m.loss
	if loss == nil {
		m.mu.Unlock()
		return nil
	}
	err = m.checkListed(resource, ids)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	next := *loss
	next.Cleared = map[string][]string{}
	maps.Copy(next.Cleared, loss.Cleared)
	cleared := slices.Concat(loss.Cleared[resource], ids)
	slices.Sort(cleared)
	next.Cleared[resource] = slices.Compact(cleared)
	return m.setLoss(&next, func() {
		if pool := m.pools[resource]; pool != nil {
			pool.Clear(ids)
		}
	})
}

// checkListed returns an error for an ID that the connected plugin does not list. m.mu is held.
func (m *Manager) checkListed(resource string, ids []string) error {
	pool := m.pools[resource]
	if pool == nil || !pool.Listed().Connected {
		return nil
	}
	for _, id := range ids {
		if !pool.Lists(id) {
			return fmt.Errorf("device %s of %s, which its plugin does not list: %w", id, resource, ErrNotFound)
		}
	}
	return nil
}

// FreeAll says that no container uses any withheld device.
//
// Errors: ErrRetry, and that of ctx.
func (m *Manager) FreeAll(ctx context.Context) error {
	unlock, err := acquire(ctx, m.clearing)
	if err != nil {
		return err
	}
	defer unlock()
	if m.Withheld() == nil {
		return nil
	}
	return m.setLoss(nil, func() {
		for _, pool := range m.pools {
			pool.ClearAll()
		}
	})
}

// setLoss records a loss, and applies it when that is durable.
func (m *Manager) setLoss(loss *state.Loss, apply func()) error {
	if err := m.open(); err != nil {
		return err
	}
	if err := m.store.SetLoss(loss); err != nil {
		return m.unwritten(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loss = loss
	apply()
	return nil
}
