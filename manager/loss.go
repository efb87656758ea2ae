package manager

import (
	"context"
	"maps"
	"slices"
	"time"

	"gpu-cdi-plugin/manager/state"
)

// Loss says that the state was damaged and has lost pods, perhaps. Every device that none of the other pods has may
// belong to one of them: it is withheld, and given to no pod before Free.
type Loss struct {
	Time   time.Time `json:"time"` // when the damage was found
	Reason string    `json:"reason"`
	// File is where the damaged state is kept.
	File string `json:"file"`
}

// Withheld returns why devices are withheld, or nil if none are.
func (m *Manager) Withheld() *Loss {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loss == nil {
		return nil
	}
	return &Loss{Time: m.loss.Time, Reason: m.loss.Reason, File: m.loss.File}
}

// Free says that no container uses these withheld devices of a resource: they can be given to pods again. An ID that is
// not withheld changes nothing.
//
// Errors: ErrRetry, and that of ctx.
func (m *Manager) Free(ctx context.Context, resource string, ids []string) error {
	unlock, err := acquire(ctx, m.clearing)
	if err != nil {
		return err
	}
	defer unlock()
	m.mu.Lock()
	loss, r := m.loss, m.resources[resource]
	if loss == nil || r == nil {
		m.mu.Unlock()
		return nil
	}
	withheld := map[string]bool{}
	for _, d := range r.pool.States() {
		withheld[d.ID] = d.Withheld
	}
	known := slices.Clone(loss.Known[resource])
	for _, id := range ids {
		if withheld[id] {
			known = append(known, id)
		}
	}
	m.mu.Unlock()
	next := *loss
	next.Known = maps.Clone(loss.Known)
	if next.Known == nil {
		next.Known = map[string][]string{}
	}
	next.Known[resource] = slices.Compact(slices.Sorted(slices.Values(known)))
	return m.setLoss(ctx, &next, func() { r.pool.Clear(known) })
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
		for _, r := range m.resources {
			r.pool.ClearAll()
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
