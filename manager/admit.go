package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/model"
)

// Admit allocates a pod's devices and returns when the placement is durable. If the pod is placed already, it keeps
// its devices: for the same request, Admit returns the same placement and calls no plugin. On an error nothing is
// placed.
//
// Errors: *RejectedError (it wraps ErrConflict if a pod with this UID is placed for another request), ErrInvalid,
// ErrRetry, and the context's.
func (m *Manager) Admit(ctx context.Context, p model.Pod, by model.Caller) (model.Placement, error) {
	return m.admit(ctx, p, by, nil)
}

// Lease allocates devices for a process, like Admit for a pod.
func (m *Manager) Lease(
	ctx context.Context, p model.Pod, by model.Caller, lease model.Lease,
) (model.Placement, error) {
	return m.admit(ctx, p, by, &lease)
}

func (m *Manager) admit(
	ctx context.Context, p model.Pod, by model.Caller, lease *model.Lease,
) (model.Placement, error) {
	if err := Validate(p); err != nil {
		return model.Placement{}, fmt.Errorf("pod %q: %w", p.UID, err)
	}
	if err := m.open(); err != nil {
		return model.Placement{}, err
	}
	unlock, err := m.lockPod(ctx, p.UID)
	if err != nil {
		return model.Placement{}, err
	}
	defer unlock()
	if have, ok := m.Pod(p.UID); ok {
		return m.readmit(have, p)
	}
	return m.place(ctx, p, by, lease)
}

// place admits a pod that is not placed.
func (m *Manager) place(
	ctx context.Context, p model.Pod, by model.Caller, lease *model.Lease,
) (model.Placement, error) {
	if lease == nil {
		if err := m.countPod(); err != nil {
			return model.Placement{}, err
		}
	}
	placement, err := m.allocate(ctx, p, by, lease)
	m.mu.Lock()
	defer m.mu.Unlock()
	if lease == nil {
		m.placing--
	}
	if err != nil {
		return model.Placement{}, err
	}
	m.admitted++
	m.pods[p.UID] = placed{Placement: placement, number: m.admitted}
	m.publish(Event{Type: PodAdmitted, Placement: &placement})
	return placement, nil
}

// countPod counts a pod as being placed. If the maximum is reached, it returns a *RejectedError. A kubelet checks the
// number only after it has allocated the pod's devices. Leases do not count: a kubelet has none, and the devices limit
// their number.
func (m *Manager) countPod() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	used := m.placing
	for _, p := range m.pods {
		if p.Lease == nil && p.Runs() {
			used++
		}
	}
	if limit := m.o.MaxPods; limit > 0 && used >= limit {
		return outOf("pods", 1, used, limit)
	}
	m.placing++
	return nil
}

// allocate allocates a pod's devices and writes the placement.
func (m *Manager) allocate(
	ctx context.Context, p model.Pod, by model.Caller, lease *model.Lease,
) (model.Placement, error) {
	a := &attempt{m: m, pod: p, reuse: admission.Reuse{}}
	if err := a.run(ctx); err != nil {
		return model.Placement{}, m.rejected(ctx, p.UID, err)
	}
	placement := model.Placement{Pod: p, Allocations: a.allocations, Admitted: time.Now(), Caller: by, Lease: lease}
	if err := m.store.Put(placement); err != nil {
		a.giveBack()
		return model.Placement{}, m.unwritten(err)
	}
	return placement, nil
}

// rejected returns the error for a pod whose admission failed.
func (m *Manager) rejected(ctx context.Context, uid string, err error) error {
	rejection, isRejected := errors.AsType[*RejectedError](err)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("admit pod %q: %w", uid, context.Cause(ctx))
	case isRejected:
		return rejection
	case errors.Is(err, admission.ErrTopologyAffinity):
		return &RejectedError{Reason: ReasonTopology, Message: err.Error(), Err: err}
	}
	return unexpected(err)
}

// Validate returns an error that wraps ErrInvalid if Admit would refuse the pod whatever devices there are.
func Validate(p model.Pod) error {
	if p.UID == "" || len(p.UID) > model.MaxUID {
		return fmt.Errorf("%w: a UID has 1 to %d characters", ErrInvalid, model.MaxUID)
	}
	seen := map[string]bool{}
	for _, c := range p.AllContainers() {
		if c.Name == "" || seen[c.Name] {
			return fmt.Errorf("%w: two containers have the name %q, or one has none", ErrInvalid, c.Name)
		}
		seen[c.Name] = true
		for resource, n := range c.Limits {
			if n < 0 {
				return fmt.Errorf("%w: container %q has the limit %d for %s", ErrInvalid, c.Name, n, resource)
			}
		}
	}
	return nil
}
