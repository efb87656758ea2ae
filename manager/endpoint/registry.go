// Package endpoint is the device manager's side of the device plugin API: it accepts registrations, receives lists of
// devices, and calls plugins.
//
//	r, err := endpoint.Start(endpoint.Options{SocketDir: "/var/lib/kubelet/device-plugins", OnChange: ...})
//	defer r.Close()
//	e, err := r.Endpoint("nvidia.com/gpu")
//	response, err := e.Allocate(ctx, ids)
//
// Plugins register in two ways: with a Register call at kubelet.sock, or with a socket in the plugin watcher's
// directory (pluginregistration/v1). In both cases the manager connects to the plugin, gets its options, and then
// opens one ListAndWatch stream. When the stream ends, the plugin counts as disconnected until it registers again.
// Each RPC has a deadline.
//
// A resource may have several instances of its plugin, for example during an update. The newest instance that has sent
// a list is the current one. When that ends, the newest of the others takes its place. If there is no instance, all
// devices are unhealthy, and after a grace period the resource is removed.
//
// Whoever can create sockets in the directories can act as a plugin, so only root and the manager's own user may write
// there: Start checks that, and the plugin watcher skips subdirectories to which other users can write. The processes
// that serve the sockets may have any user, since plugins may run in a user namespace. Otherwise plugins are not
// trusted: no name in their messages leads out of the directories, and numbers and sizes are limited.
//
// Tests use the plugin in test/lib/plugintest.
package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/manager/model"
)

var (
	// ErrInUse means that a kubelet or another manager serves the directory.
	ErrInUse = errors.New("a kubelet or another device manager serves this directory")
	// ErrRegistryInUse means that another manager watches the directory of the plugin watcher.
	ErrRegistryInUse = errors.New("another device manager watches this directory")
	// ErrSameDirectory means that the directory of kubelet.sock is the plugin watcher's directory or below it. The
	// watcher would find the sockets of plugins that call Register, and register these plugins a second time.
	ErrSameDirectory = errors.New("it contains kubelet.sock, where other plugins register")
	// ErrForeignDirectory means that the directory has content, although neither a kubelet nor a manager has used it.
	ErrForeignDirectory = errors.New("it is not a directory of device plugins, and all sockets in it would be removed")
	// ErrUnknownResource means that no plugin has registered the resource, or that the resource was removed.
	ErrUnknownResource = errors.New("no device plugin has registered the resource")
	// ErrStopped means that the plugin's ListAndWatch stream has ended. The plugin must register again.
	ErrStopped = errors.New("has been stopped")
)

// Options are the options of a registry.
type Options struct {
	// SocketDir is the absolute path of the directory of kubelet.sock and of the plugins' sockets. A missing directory
	// is created. Start removes all sockets in it; plugins notice that and register again. So the directory must be
	// empty, or the kubelet's own, or contain kubelet.sock, LockName or the kubelet's checkpoint.
	SocketDir string
	// RegistryDir is the absolute path of the directory in which the plugin watcher searches for sockets, the
	// kubelet's plugins_registry. It must be neither SocketDir nor above it. If it is empty, there is no plugin
	// watcher.
	RegistryDir string
	// Known are the resources that had plugins before a restart. They have no devices until their plugins register
	// again. If that takes longer than the grace period, they are removed.
	Known     []string
	Deadlines Deadlines
	// Log receives what administrators should know about plugins. Nil means slog.Default.
	Log *slog.Logger
	// OnRegister is called with the name of the resource after each successful registration, before the plugin gets
	// the response.
	OnRegister func(resource string)
	// OnChange is called after a resource's first list, and after each change of its devices or of Connected. For each
	// resource the calls are in order. It must not change the slices. Until it returns, no more lists of the resource
	// are received. It may call Endpoint.
	OnChange func(model.Resource)
	// OnGone is called with the name of a resource when its grace period has ended and no plugin has registered.
	OnGone func(name string)
}

// Deadlines limit how long plugins may take. Zero means the default.
type Deadlines struct {
	Dial      time.Duration // to accept a connection: 10 s
	Options   time.Duration // GetDevicePluginOptions: 10 s
	Allocate  time.Duration // 10 s
	Preferred time.Duration // GetPreferredAllocation: 10 s
	PreStart  time.Duration // PreStartContainer: 30 s
	Info      time.Duration // GetInfo of the plugin watcher: 1 s
	Notify    time.Duration // NotifyRegistrationStatus of the plugin watcher: 5 s
	// Grace is how long a resource keeps its devices, as unhealthy ones, after its plugin is gone: 5 minutes.
	Grace time.Duration
}

func (d Deadlines) withDefaults() Deadlines {
	return Deadlines{
		Dial:      cmp.Or(d.Dial, 10*time.Second),
		Options:   cmp.Or(d.Options, 10*time.Second),
		Allocate:  cmp.Or(d.Allocate, 10*time.Second),
		Preferred: cmp.Or(d.Preferred, 10*time.Second),
		PreStart:  cmp.Or(d.PreStart, 30*time.Second),
		Info:      cmp.Or(d.Info, time.Second),
		Notify:    cmp.Or(d.Notify, 5*time.Second),
		Grace:     cmp.Or(d.Grace, 5*time.Minute),
	}
}

// Registry has the resources that plugins have registered. Its methods may be called concurrently.
type Registry struct {
	opts   Options
	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	lock   *fileio.Lock
	server *grpc.Server
	// running counts the goroutines of the server, the plugin watcher and the plugins' streams.
	running sync.WaitGroup

	mu        sync.Mutex
	resources map[string]*resource
	sockets   map[string]bool // by path in the watcher's directory: whether the plugin there is registered
	closed    bool
	failure   error // why the server no longer serves
}

// Start prepares the directories, removes sockets of earlier processes and serves until Close. Errors wrap ErrInUse,
// ErrRegistryInUse, ErrSameDirectory, ErrForeignDirectory, trust.ErrUnsafe if other users can write to a directory, or
// errors of the file system.
func Start(o Options) (*Registry, error) {
	o.Deadlines = o.Deadlines.withDefaults()
	o.Log = cmp.Or(o.Log, slog.Default())
	held, err := claim(o.SocketDir, o.RegistryDir, o.Log)
	if err != nil {
		return nil, err
	}
	r := &Registry{opts: o, lock: held, resources: map[string]*resource{}, sockets: map[string]bool{}}
	var w *watcher
	if o.RegistryDir != "" {
		if w, err = newWatcher(r, o.RegistryDir); err != nil {
			return nil, errors.Join(err, held.File().Close())
		}
	}
	listener, err := replaceSocket(filepath.Join(o.SocketDir, SocketName))
	if err != nil {
		if w != nil {
			w.close()
		}
		return nil, errors.Join(fmt.Errorf("serve the directory %s: %w", o.SocketDir, err), held.File().Close())
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.mu.Lock()
	for _, name := range o.Known {
		r.resources[name] = r.knownResource(name)
	}
	r.mu.Unlock()
	r.server = newServer(r)
	r.running.Go(func() { r.serve(listener) })
	if w != nil {
		r.running.Go(func() { w.run(r.ctx) })
	}
	return r, nil
}

func (r *Registry) serve(l net.Listener) {
	if err := r.server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		r.mu.Lock()
		r.failure = fmt.Errorf("device registration error: device plugin registration gRPC server failed and no device "+
			"plugins can register: %w", err)
		r.mu.Unlock()
		r.opts.Log.Error("no device plugin can register any more: restart the manager", "error", err)
	}
}

// Sockets returns for each socket in the plugin watcher's directory, by path, whether the plugin there is registered.
func (r *Registry) Sockets() map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.sockets)
}

// Check returns why plugins cannot register, or nil.
func (r *Registry) Check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failure
}

// Close closes the connections to all plugins and removes the manager's socket. It does not call OnChange or OnGone.
// It waits until running calls of these have returned, so they must not call Close.
func (r *Registry) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	resources := slices.Collect(maps.Values(r.resources))
	r.mu.Unlock()
	r.cancel()
	r.server.Stop()
	for _, res := range resources {
		res.order.Lock() // waits until a callback has returned
		r.mu.Lock()
		res.close()
		r.mu.Unlock()
		res.order.Unlock()
	}
	r.running.Wait()
	return r.lock.File().Close()
}

// Endpoint returns the current instance of a resource's plugin. The instance may have stopped. The error wraps
// ErrUnknownResource.
func (r *Registry) Endpoint(resource string) (*Endpoint, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if res := r.resources[resource]; res != nil && res.current() != nil {
		return res.current(), nil
	}
	return nil, fmt.Errorf("%s: %w", resource, ErrUnknownResource)
}
