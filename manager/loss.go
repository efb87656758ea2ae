package manager

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/state"
)

// Withheld returns why devices are withheld, or nil if none are. Pods do not get withheld devices before Free. The IDs
// of freed devices are not in the result.
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

// maxQuoted is how many bytes of a name in a request a message quotes.
const maxQuoted = 200

// Free makes withheld devices of a resource available again. The caller knows that no container uses these devices.
// Nothing changes if no devices are withheld.
//
// Errors: ErrNotFound if the plugin does not list one of the IDs (then no device is freed), ErrRetry, also while the
// plugin is disconnected, and the context's.
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

// checkListed returns an error if the plugin does not list one of the IDs. Other IDs must not get into the state, where
// they would stay. The caller holds m.mu.
func (m *Manager) checkListed(resource string, ids []string) error {
	pool := m.pools[resource]
	if pool == nil || !pool.Listed().Connected {
		return fmt.Errorf("the plugin of %q is not connected, and only devices that it lists can be freed: %w",
			wording.Shorten(resource, maxQuoted), ErrRetry)
	}
	for _, id := range ids {
		if !pool.Lists(id) {
			return fmt.Errorf("device %q of %s, which its plugin does not list: %w",
				wording.Shorten(id, maxQuoted), resource, ErrNotFound)
		}
	}
	return nil
}

// FreeAll makes all withheld devices available again.
//
// Errors: ErrRetry, and the context's.
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

// setLoss writes a loss to the state, and calls apply when it is durable.
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
