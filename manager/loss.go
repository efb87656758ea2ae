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
	freed, err := m.freeable(resource, ids)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	next := *loss
	next.Cleared = map[string][]string{}
	maps.Copy(next.Cleared, loss.Cleared)
	cleared := slices.Concat(loss.Cleared[resource], freed)
	slices.Sort(cleared)
	next.Cleared[resource] = slices.Compact(cleared)
	return m.setLoss(ctx, &next, func() {
		if pool := m.pools[resource]; pool != nil {
			pool.Clear(freed)
		}
	})
}

// freeable returns those of the IDs that no known pod holds: one that a pod holds is withheld only when that is
// released, for its record may be an old one. m.mu is held.
func (m *Manager) freeable(resource string, ids []string) ([]string, error) {
	pool := m.pools[resource]
	if pool == nil {
		return ids, nil
	}
	var freed []string
	for _, id := range ids {
		pod, _ := pool.Holder(id)
		switch {
		case pod != "":
		case pool.Listed().Connected && !pool.Lists(id):
			return nil, fmt.Errorf("device %s of %s, which its plugin does not list: %w", id, resource, ErrNotFound)
		default:
			freed = append(freed, id)
		}
	}
	return freed, nil
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
	return m.setLoss(ctx, nil, func() {
		for _, pool := range m.pools {
			pool.ClearAll()
		}
	})
}

// setLoss records a loss, and applies it when that is durable.
func (m *Manager) setLoss(ctx context.Context, loss *state.Loss, apply func()) error {
	if err := m.open(); err != nil {
		return err
	}
	if err := m.store.SetLoss(ctx, loss); err != nil {
		return m.unwritten(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loss = loss
	apply()
	return nil
}
