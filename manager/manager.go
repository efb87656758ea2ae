// Package manager does the work of the kubelet's device manager on a host without a kubelet: plugins register with it,
// pods are admitted with devices, and their containers get run options. It joins the packages below it: endpoint calls
// the plugins, admission chooses the devices, state stores the placements.
//
// A pod holds its devices from Admit to Release, across restarts of the manager, its plugins and its containers. One
// pod at a time holds a device. Each change is durable when its method returns.
package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"

	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

// Options are the options of a manager. Dir and StateFile are required.
type Options struct {
	// Dir is the absolute path of the directory of kubelet.sock and of the plugins' sockets.
	Dir string
	// RegistryDir is the plugin watcher's directory (plugins_registry). Empty disables the plugin watcher.
	RegistryDir string
	// StateFile is the path of the file with the placements. Its directory must exist.
	StateFile string
	// Topology has the policy of the Topology Manager and the machine's NUMA nodes. The default policy is none.
	Topology admission.Topology
	// Seed makes the choice of devices random but repeatable. Without it, devices are taken in the order of their IDs.
	Seed *uint64
	// Deadlines limit how long plugins may take.
	Deadlines endpoint.Deadlines
	// Observer is notified of what plugins do; optional.
	Observer Observer
	// Log receives what an administrator should know. The default is slog.Default.
	Log *slog.Logger
}

// Manager is a device manager. Its methods are safe for concurrent use.
type Manager struct {
	o         Options
	store     *state.Store
	registry  *endpoint.Registry
	clearing  chan struct{}   // the lock of changes to loss
	recording sync.Mutex      // the lock of changes to the names of the resources
	running   context.Context // ends when nothing can be changed any more; has the cause
	stop      context.CancelCauseFunc

	mu       sync.Mutex       // is never held during a call to a plugin or a write of the state
	pools    map[string]*pool // by resource
	pods     map[string]placed
	admitted uint64                   // the number of pods placed so far
	busy     map[string]chan struct{} // the pods that a call is changing; closed when it returns
	loss     *state.Loss
	random   *rand.Rand
	watchers map[chan Event]func() bool
}

// pool has the devices of a resource and the pods that hold them.
type pool struct {
	*admission.Pool

	admitting chan struct{} // the lock of admissions that choose devices of the resource
}

// known reports whether the resource has a plugin or is in its grace period, or a pod holds a device of it.
func (p *pool) known() bool { return p.Registered() || p.Held() > 0 }

func (p *pool) count() Count {
	capacity, allocatable := p.Counts()
	return Count{Capacity: capacity, Allocatable: allocatable}
}

// placed is a pod with its place in the order of admission.
type placed struct {
	model.Placement
	number uint64
}

// errEnded is the error of a manager that has ended.
var errEnded = errors.New("the device manager has ended")

// New opens the state, restores its placements, and serves the plugins. The caller must call Run.
//
// Errors: state.ErrLocked, state.ErrNewer, endpoint.ErrInUse, endpoint.ErrRegistryInUse, endpoint.ErrSameDirectory,
// endpoint.ErrForeignDirectory, trust.ErrUnsafe, and those of the file system.
func New(o Options) (*Manager, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Observer == nil {
		o.Observer = noObserver{}
	}
	if err := o.Topology.Validate(); err != nil {
		return nil, fmt.Errorf("the Topology Manager: %w", err)
	}
	store, loaded, err := state.Open(o.StateFile, o.Log, o.EarlierFiles...)
	if err != nil {
		return nil, fmt.Errorf("open the state of the device manager: %w", err)
	}
	m := &Manager{
		o: o, store: store, loss: loaded.Loss,
		clearing: make(chan struct{}, 1), pools: map[string]*pool{}, pods: map[string]placed{},
		busy: map[string]chan struct{}{}, watchers: map[chan Event]func() bool{},
	}
	m.running, m.stop = context.WithCancelCause(context.Background())
	if o.Seed != nil {
		m.random = rand.New(rand.NewPCG(*o.Seed, 0))
	}
	m.restore(loaded)
	m.registry, err = endpoint.Start(endpoint.Options{
		SocketDir: o.Dir, RegistryDir: o.RegistryDir, Known: loaded.Resources,
		Deadlines: o.Deadlines, Log: o.Log,
		OnRegister: o.Observer.Registered, OnChange: m.changed, OnGone: m.removed,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("serve device plugins: %w", err), store.Close())
	}
	return m, nil
}

// Run waits until ctx ends, then closes the connections to the plugins and the state. After that nothing can be
// changed. It is called once.
//
// It returns an error that wraps state.ErrBroken as soon as it is unknown what is on the disk.
func (m *Manager) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
	case <-m.running.Done():
	}
	err := m.open()
	m.stop(errEnded)
	m.mu.Lock()
	for events := range m.watchers {
		m.unwatch(events)
	}
	m.mu.Unlock()
	return errors.Join(err, m.registry.Close(), m.store.Close())
}

// Check returns why plugins cannot register or nothing can be changed any more, or nil. It blocks if the manager hangs.
func (m *Manager) Check() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cmp.Or(m.registry.Check(), m.open())
}

// PluginSockets returns, for each socket of the plugin watcher by its path, whether the plugin there is registered.
func (m *Manager) PluginSockets() map[string]bool { return m.registry.Sockets() }

// open returns why nothing can be changed any more, or nil.
func (m *Manager) open() error { return context.Cause(m.running) }

// unwritten returns the error for a change that could not be written. If it is unknown what is on the disk, the manager
// ends: its next start reads what is there.
func (m *Manager) unwritten(err error) error {
	if errors.Is(err, state.ErrBroken) {
		m.stop(err)
	}
	return fmt.Errorf("%w: %w", ErrRetry, err)
}

// pool returns the pool of a resource and creates it if needed. m.mu is held.
func (m *Manager) pool(resource string) *pool {
	p, ok := m.pools[resource]
	if !ok {
		p = &pool{Pool: admission.NewPool(resource), admitting: make(chan struct{}, 1)}
		if m.loss != nil {
			p.Withhold(m.loss.Cleared[resource])
		}
		m.pools[resource] = p
	}
	return p
}
