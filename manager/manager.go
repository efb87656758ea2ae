// Package manager does what the kubelet's device manager does, without a kubelet: plugins register with it, pods are
// admitted with devices, and their containers get run options. It joins the packages below it: endpoint calls the
// plugins, admission chooses the devices, and state keeps the placements.
//
// A pod holds its devices from Admit to Release, also when the manager, a plugin or a container restarts. A device is
// held by one pod at a time. Each change is durable when its method returns.
package manager

import (
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

// Options are the options of a manager. Dir and StateFile are required; the other fields have defaults.
type Options struct {
	// Dir is the directory of the registration socket kubelet.sock and of the plugins' sockets, an absolute path.
	Dir string
	// RegistryDir is the directory of the plugin watcher (plugins_registry). Empty means that there is none.
	RegistryDir string
	// StateFile is the file of the placements. Its directory must exist.
	StateFile string
	// EarlierFiles are paths at which earlier versions kept the placements. If one of them exists and StateFile does
	// not, all devices are withheld.
	EarlierFiles []string
	// Topology is the policy of the Topology Manager, and the machine's NUMA nodes. The default policy is none.
	Topology admission.Topology
	// Seed makes the choice of devices random, and repeatable. If it is nil, devices are taken in the order of their
	// IDs.
	Seed *uint64
	// MaxPods is how many pods besides leases can be placed at a time; 0 means any number.
	MaxPods int
	// Deadlines are how long plugins may take.
	Deadlines endpoint.Deadlines
	// Observer is notified of what plugins do; optional.
	Observer Observer
	// Log gets what an administrator should know. The default is slog.Default.
	Log *slog.Logger
}

// Manager is a device manager. Its methods are safe for concurrent use.
type Manager struct {
	o         Options
	store     *state.Store
	registry  *endpoint.Registry
	clearing  chan struct{}   // held while the loss is changed
	recording sync.Mutex      // held while the names of the resources are recorded
	running   context.Context // ends, with the cause, when nothing can be changed any more
	stop      context.CancelCauseFunc

	mu       sync.Mutex       // held only briefly: never while a plugin is called or the state is written
	pools    map[string]*pool // by resource
	pods     map[string]placed
	placing  int                      // the number of pods besides leases that are being placed
	admitted uint64                   // the number of pods that were placed so far
	busy     map[string]chan struct{} // the pods that a call is changing; the channel is closed when the call returns
	loss     *state.Loss
	random   *rand.Rand
	watchers map[chan Event]func() bool
}

// pool has the devices of a resource, and the pods that hold them.
type pool struct {
	*admission.Pool

	admitting chan struct{} // held by the admission that chooses devices of this pool
}

// known reports whether a plugin has registered the resource (and its grace period has not ended), or a pod holds a
// device of it.
func (p *pool) known() bool { return p.Registered() || p.Held() > 0 }

func (p *pool) count() Count {
	capacity, allocatable := p.Counts()
	return Count{Capacity: capacity, Allocatable: allocatable}
}

// placed is a pod and its place in the order of admission.
type placed struct {
	model.Placement
	number uint64
}

// errEnded is the answer of a manager that no longer runs.
var errEnded = errors.New("the device manager has ended")

// New opens the state, lets the recorded pods hold their devices again, and starts to serve plugins. The caller then
// calls Run.
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

// Run waits until ctx ends, and then closes the manager: the connections to the plugins, and the state. After that
// nothing can be changed. Run is called once.
//
// If it becomes unknown whether a change is on the disk, Run returns at once with an error that wraps state.ErrBroken.
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

// Check returns nil, or why plugins cannot register or nothing can be changed any more. If the manager hangs, Check
// does not return.
func (m *Manager) Check() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.registry.Check(); err != nil {
		return err
	}
	return m.open()
}

// PluginSockets returns for each socket in the plugin watcher's directory, by path, whether the plugin there is
// registered.
func (m *Manager) PluginSockets() map[string]bool { return m.registry.Sockets() }

// open returns nil, or why nothing can be changed any more.
func (m *Manager) open() error { return context.Cause(m.running) }

// unwritten returns the answer to a request whose change could not be written. If it is unknown whether the change is
// on the disk, the manager ends: the next start shows it.
func (m *Manager) unwritten(err error) error {
	if errors.Is(err, state.ErrBroken) {
		m.stop(err)
	}
	return fmt.Errorf("%w: %w", ErrRetry, err)
}

// pool returns the pool of a resource, and makes it if there is none. The caller holds m.mu.
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
