// Package manager is the kubelet's device manager without the kubelet: plugins register with it, pods are admitted with
// devices, and their containers get run options. It joins the packages below it: endpoint speaks to the plugins,
// admission chooses the devices, state keeps the placements.
//
// A pod holds its devices from Admit to Release, over restarts of the manager, its plugins and its containers. A device
// is held by one pod at a time. Each change is durable when its method returns.
package manager

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"gpu-cdi-plugin/manager/dialect"
	"gpu-cdi-plugin/manager/model"
)

// Options are the options of a manager. Dir and StateFile are needed, the other fields have defaults.
type Options struct {
	// Dir is the directory of the registration socket kubelet.sock and of the plugins' sockets, an absolute path.
	Dir string
	// RegistryDir is the directory of the plugin watcher (plugins_registry). Empty means that there is none.
	RegistryDir string
	// StateFile is the file of the placements.
	StateFile string
	// Dialect has the kubelet's faults to show. The zero value has none.
	Dialect dialect.Dialect
	// NUMANodes are the IDs of the machine's NUMA nodes.
	NUMANodes []int
	// Log gets what an administrator should know. The default is slog.Default.
	Log *slog.Logger
	// Now is the clock. The default is time.Now.
	Now func() time.Time
}

// Manager is a device manager. Its methods are safe for concurrent use.
type Manager struct{}

// New opens the state and takes the placements in it. The plugins can register when Run runs.
func New(o Options) (*Manager, error) { return nil, errors.ErrUnsupported }

// Run serves the plugins until ctx ends, and returns nil then. It returns a *dialect.CrashError where the kubelet of
// the dialect would crash. When it returns, the state is closed and every other method returns an error. Run is called
// once.
func (m *Manager) Run(ctx context.Context) error { return errors.ErrUnsupported }

// Admit gives a pod its devices, and returns when that is durable. A pod that is placed already keeps what it has: the
// same request returns the same placement, without asking a plugin. On every error nothing is placed.
//
// Errors: *RejectedError, ErrInvalid, ErrConflict (the UID has another request), ErrRetry, *dialect.CrashError, and
// that of ctx.
func (m *Manager) Admit(ctx context.Context, p model.Pod, by model.Caller) (model.Placement, error) {
	return model.Placement{}, errors.ErrUnsupported
}

// Start returns the run options of a container, before each of its starts. It calls PreStartContainer of the plugins
// that require it.
//
// Errors: ErrNotFound, ErrConflict (the container has ended), ErrRetry (a plugin is away or failed), and that of ctx.
func (m *Manager) Start(ctx context.Context, podUID, container string) (model.RunOptions, error) {
	return model.RunOptions{}, errors.ErrUnsupported
}

// Ended says that a container has ended for good, as an init container that has succeeded. Devices that no other
// container of the pod has become free. A second call for the same container changes nothing.
//
// Errors: ErrNotFound, ErrRetry, and that of ctx.
func (m *Manager) Ended(ctx context.Context, podUID, container string) error { return errors.ErrUnsupported }

// Release takes a pod's devices back. It waits for a call that is under way for the pod.
//
// Errors: ErrNotFound, ErrRetry, and that of ctx.
func (m *Manager) Release(ctx context.Context, podUID string) error { return errors.ErrUnsupported }

// Pods returns the placed pods in the order of their admission.
func (m *Manager) Pods() []model.Placement { return nil }

// Pod returns a placed pod.
func (m *Manager) Pod(podUID string) (model.Placement, bool) { return model.Placement{}, false }
