package manager

import (
	"context"
	"fmt"
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// RunOptions returns the run options of a container without a preparation of its devices.
//
// Errors: ErrNotFound, ErrBadResponse, and the context's.
func (m *Manager) RunOptions(ctx context.Context, podUID, container string) (model.RunOptions, error) {
	unlock, p, err := m.lockPlaced(ctx, podUID, container)
	if err != nil {
		return model.RunOptions{}, err
	}
	defer unlock()
	return runOptions(allocationsOf(p, container))
}

func allocationsOf(p model.Placement, container string) []model.Allocation {
	others := func(a model.Allocation) bool { return a.Container != container }
	return slices.DeleteFunc(slices.Clone(p.Allocations), others)
}

// Start returns the run options of a container. It is called before each start of the container, and calls
// PreStartContainer of the plugins that require it. Until Start returns, the pod cannot be released: a plugin may be
// preparing devices of the pod.
//
// Errors: ErrNotFound, ErrConflict (the container has ended), ErrRetry (a plugin is disconnected or failed),
// ErrBadResponse (a response to Allocate fails model.RunOptions.Check; then PreStartContainer is not called), and the
// context's.
func (m *Manager) Start(ctx context.Context, podUID, container string) (model.RunOptions, error) {
	unlock, p, err := m.lockPlaced(ctx, podUID, container)
	if err != nil {
		return model.RunOptions{}, err
	}
	defer unlock()
	if slices.Contains(p.Ended, container) {
		return model.RunOptions{}, fmt.Errorf("start container %q of pod %q, which has ended: %w",
			container, podUID, ErrConflict)
	}
	has := allocationsOf(p, container)
	options, err := runOptions(has) // checks the responses, before a device is prepared
	for i := 0; err == nil && i < len(has); i++ {
		err = m.preStart(ctx, has[i])
	}
	if err != nil {
		return model.RunOptions{}, fmt.Errorf("start container %q of pod %q: %w", container, podUID, err)
	}
	return options, nil
}

// preStart calls PreStartContainer if the plugin requires it. After a restart of the manager this is unknown until the
// plugin has registered again.
func (m *Manager) preStart(ctx context.Context, a model.Allocation) error {
	plugin, err := m.registry.Endpoint(a.Resource)
	if err != nil || plugin.Socket() == "" {
		return fmt.Errorf("%w: no plugin is registered for %s, "+
			"which may have to prepare the devices", ErrRetry, a.Resource)
	}
	if !plugin.Options().GetPreStartRequired() {
		return nil
	}
	if err := plugin.PreStart(ctx, a.IDs); err != nil {
		return fmt.Errorf("%w: device plugin PreStartContainer rpc failed with err: %w", ErrRetry, err)
	}
	return nil
}
