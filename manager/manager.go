// Package manager is the kubelet's device manager without the kubelet: plugins register with it, pods are admitted with
// devices, and their containers get run options. It joins the packages below it: endpoint speaks to the plugins,
// admission chooses the devices, state keeps the placements.
//
// A pod holds its devices from Admit to Release, over restarts of the manager, its plugins and its containers. A device
// is held by one pod at a time. Each change is durable when its method returns.
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

// Options are the options of a manager. Dir and StateFile are needed, the other fields have defaults.
type Options struct {
	// Dir is the directory of the registration socket kubelet.sock and of the plugins' sockets, an absolute path.
	Dir string
	// RegistryDir is the directory of the plugin watcher (plugins_registry). Empty means that there is none.
	RegistryDir string
	// StateFile is the file of the placements. Its directory must exist.
	StateFile string
	// EarlierFiles are where earlier versions kept the placements. If one exists and StateFile does not, all devices are
	// withheld.
	EarlierFiles []string
	// Topology is the policy of the Topology Manager, and the machine's NUMA nodes. The default policy is none.
	Topology admission.Topology
	// Seed makes the choice of devices random, and repeatable. Without it, devices are taken in the order of their IDs.
	Seed *uint64
	// Deadlines are how long plugins may take.
	Deadlines endpoint.Deadlines
	// Observer is notified of what happens; nil is none.
	Observer Observer
	// Log gets what an administrator should know. The default is slog.Default.
	Log *slog.Logger
}

// Manager is a device manager. Its methods are safe for concurrent use.
type Manager struct {
	o         Options
	store     *state.Store
	registry  *endpoint.Registry
	clearing  chan struct{}   // the lock of changes of loss
	recording sync.Mutex      // of the names of the resources
	running   context.Context // until nothing can be changed any more, with the cause
	stop      context.CancelCauseFunc

	mu       sync.Mutex       // held only briefly: never during a call to a plugin or a write of the state
	pools    map[string]*pool // by resource
	pods     map[string]placed
	admitted uint64                   // the number of pods that were placed so far
	busy     map[string]chan struct{} // the pods that a call changes; closed when it returns
	loss     *state.Loss
	random   *rand.Rand
	watchers map[chan Event]func() bool
}

// pool is the devices of a resource, with who holds them.
type pool struct {
	*admission.Pool

	admitting chan struct{} // the lock of the admissions that choose devices of it
}

// known is whether a plugin has registered the resource, and was not away for too long, or a pod holds a device of it.
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

// errEnded is the answer of a manager that no longer runs.
var errEnded = errors.New("the device manager has ended")

// New opens the state, takes the placements in it, and serves the plugins. The caller calls Run.
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

// Run waits until ctx ends, and closes the manager: the connections to the plugins and the state. Nothing can be
// changed any more then. It is called once.
//
// The error wraps state.ErrBroken as soon as it is unknown what the disk has.
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

// Check returns why plugins cannot register or nothing can be changed any more, or nil. It does not return if the
// manager hangs.
func (m *Manager) Check() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cmp.Or(m.registry.Check(), m.open())
}

// PluginSockets returns whether the plugin at each socket of the plugin watcher is registered, by the socket's path.
func (m *Manager) PluginSockets() map[string]bool { return m.registry.Sockets() }

// open returns why nothing can be changed any more, or nil.
func (m *Manager) open() error { return context.Cause(m.running) }

// unwritten returns the answer to a request whose change could not be written. The manager ends if it is unknown what
// the disk has: another start shows it.
func (m *Manager) unwritten(err error) error {
	if errors.Is(err, state.ErrBroken) {
		m.stop(err)
	}
	return fmt.Errorf("%w: %w", ErrRetry, err)
}

// pool returns the pool of a resource, which may be new. m.mu is held.
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
