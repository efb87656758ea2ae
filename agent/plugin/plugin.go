package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

var (
	// ErrNoKubelet means that the path of the directory for the sockets leads to something else: no kubelet uses it.
	ErrNoKubelet = errors.New("the kubelet cannot be reached")
	// ErrLongPath means that the paths of sockets in the directory could be longer than the kernel allows.
	ErrLongPath = errors.New("the path of the directory of sockets is too long")
)

// Options configure a Plugin.
type Options struct {
	// Dir is the kubelet's device plugin directory. It has the kubelet's socket, kubelet.sock, and the plugin's.
	Dir string
	// RegistryDir, if not empty, is the kubelet's directory of plugin sockets, plugins_registry. The plugin then makes
	// its sockets there, and the kubelet finds them. The plugin does not call Register, and Dir may be empty.
	RegistryDir string
	// Beside says that another instance may still serve the resources and is about to end. The sockets then have other
	// names than its sockets.
	Beside bool
	// Allocate configures how containers get their devices.
	Allocate AllocateOptions
	Log      *slog.Logger
	// Observer is notified of events; optional.
	Observer Observer

	retired *atomic.Bool // set by Retire

	// Only tests set these; the zero value is the default.
	registerTimeout time.Duration // for the answer to a Register call
	streamGrace     time.Duration // between a registration and the call of ListAndWatch
	drainTimeout    time.Duration // for running calls when Run ends
	newWatcher      func() (*fsnotify.Watcher, error)
}

// Observer is notified of events, for metrics. Its methods must return at once and may be called concurrently.
type Observer interface {
	// Registered is called after an attempt to register. If the kubelet accepted, err is nil.
	Registered(resource string, err error)
	// Watched is called when the kubelet begins to watch the resource's devices, and when it no longer does.
	Watched(resource string, watched bool)
	// Allocated is called after an Allocate call, with its result, the number of devices and the duration.
	Allocated(resource string, code codes.Code, devices int, took time.Duration)
}

// noObserver ignores all notifications.
type noObserver struct{}

// Registered implements Observer.
func (noObserver) Registered(string, error) {}

// Watched implements Observer.
func (noObserver) Watched(string, bool) {}

// Allocated implements Observer.
func (noObserver) Allocated(string, codes.Code, int, time.Duration) {}

// Plugin serves the resources of a node. It is an actor: call Run once. The other methods may be called concurrently,
// also before and after Run.
type Plugin struct {
	opts Options

	mu        sync.Mutex
	endpoints map[string]*endpoint
	start     func(*endpoint) // runs an endpoint; nil while Run is not running
}

// New returns a Plugin. It only checks the options; the error may be ErrLongPath.
func New(o Options) (*Plugin, error) {
	if err := checkLength(o.dir()); err != nil {
		return nil, fmt.Errorf("set up the device plugin: %w", err)
	}
	// The kubelet needs 10 seconds to notice that it cannot reach the plugin.
	o.registerTimeout = cmp.Or(o.registerTimeout, 15*time.Second)
	o.streamGrace = cmp.Or(o.streamGrace, 3*time.Second)
	o.drainTimeout = cmp.Or(o.drainTimeout, 5*time.Second)
	if o.newWatcher == nil {
		o.newWatcher = wake.NewDirWatcher
	}
	if o.Observer == nil {
		o.Observer = noObserver{}
	}
	o.retired = new(atomic.Bool)
	return &Plugin{opts: o, endpoints: map[string]*endpoint{}}, nil
}

// dir returns the directory of the plugin's sockets.
func (o *Options) dir() string { return cmp.Or(o.RegistryDir, o.Dir) }

// kubeletSocket returns the path of the socket on which the kubelet receives Register calls.
func (o *Options) kubeletSocket() string { return filepath.Join(o.Dir, kubeletSocketName) }

// Update replaces the devices of all resources, and how their GPUs are connected: if gpus is nil, all count as equally
// well connected. The resources must come from resource.Build, which checks names, IDs
// and sizes. A new resource gets an endpoint. The endpoint of a resource that is gone stays, without devices, so that
// the kubelet learns at once that there are none. When Update returns, devices that are gone can no longer be
// allocated.
//
// If there is an error, it names the resources that keep their old devices. All others have their new devices.
func (p *Plugin) Update(resources []resource.Resource, gpus *allocator.GPUs) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	gone := maps.Clone(p.endpoints)
	for i := range resources {
		delete(gone, resources[i].Name)
		errs = append(errs, p.update(resources[i], gpus))
	}
	for name := range gone {
		errs = append(errs, p.update(resource.Resource{Name: name}, nil))
	}
	return errors.Join(errs...)
}

func (p *Plugin) update(r resource.Resource, gpus *allocator.GPUs) error {
	if e := p.endpoints[r.Name]; e != nil {
		return e.server.update(r, gpus)
	}
	taken := func(path string) bool {
		for _, e := range p.endpoints {
			if e.planned == path {
				return true
			}
		}
		return false
	}
	server, err := newServer(r, gpus, p.opts.Allocate, p.usedSlices, p.opts.Log, p.opts.Observer)
	if err != nil {
		return err
	}
	e := newEndpoint(r.Name, socketPath(p.opts.dir(), r.Name, taken), server, &p.opts)
	p.endpoints[r.Name] = e
	if p.start != nil {
		p.start(e)
	}
	return nil
}

// Retire makes the plugin register no more, since another instance does. It serves until Run ends.
func (p *Plugin) Retire() { p.opts.retired.Store(true) }

// Reconnect ends the kubelet's watch of a resource, so that the resource is registered again.
func (p *Plugin) Reconnect(resource string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.endpoints[resource]; e != nil {
		e.server.endWatchers()
	}
}

// Resend sends the devices of a resource that the kubelet watches to it once more, although they have not changed: the
// kubelet then writes its checkpoint. It returns false if the kubelet watches none.
func (p *Plugin) Resend() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(p.endpoints)) {
		if s := p.endpoints[name].server; s.watched() {
			s.resend()
			return true
		}
	}
	return false
}

// Check returns ErrNoKubelet if the path of the directory for the sockets leads to something else. A directory that
// does not exist is not an error: Run waits for it.
func (p *Plugin) Check() error {
	info, err := os.Stat(p.opts.dir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoKubelet, err)
	}
	if !info.IsDir() {
		return fmt.Errorf("%w: %s is not a directory", ErrNoKubelet, p.opts.dir())
	}
	return nil
}

// Run serves until ctx ends. Then it waits for running calls, and removes its sockets and locks. If no kubelet runs,
// it waits for one, also for the kubelet's directory. It returns earlier only if waiting would not help: with
// fileio.ErrHeld if another instance serves a resource, and at the start with ErrNoKubelet, or with the error of a
// socket that cannot be made.
func (p *Plugin) Run(ctx context.Context) error {
	if exists, err := p.awaitDir(ctx); !exists || err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	p.setStart(func(e *endpoint) { g.Go(func() error { return e.run(ctx) }) })
	p.watchDir(ctx)
	p.setStart(nil)
	return g.Wait()
}

// awaitDir waits until the directory for the sockets exists, or ctx ends. The directories above it may not exist
// either, so nothing reports a change.
func (p *Plugin) awaitDir(ctx context.Context) (exists bool, err error) {
	for {
		if _, err := os.Stat(p.opts.dir()); !errors.Is(err, fs.ErrNotExist) {
			return true, p.Check()
		}
		p.setReasons(noKubelet("directory", p.opts.dir()))
		select {
		case <-ctx.Done():
			return false, nil
		case <-time.After(pollMissing):
		}
	}
}

// setReasons records why no resource is registered.
func (p *Plugin) setReasons(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.endpoints {
		e.setReason(err)
	}
}

// setStart sets the function that runs an endpoint, and runs the existing endpoints. With nil, new endpoints are not
// run.
func (p *Plugin) setStart(start func(*endpoint)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.start = start
	if start == nil {
		return
	}
	for _, e := range p.endpoints {
		start(e)
	}
}

// Status is the registration of a resource with the kubelet.
type Status struct {
	Resource string
	// Watched is true while the resource is registered and the kubelet watches its devices.
	Watched bool
	// Reason says why the kubelet does not watch, or is empty.
	Reason string
	// Devices and Healthy are the numbers of advertised devices and of healthy ones.
	Devices, Healthy int
}

// Status returns the status of each resource, ordered by name.
func (p *Plugin) Status() []Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]Status, 0, len(p.endpoints))
	for _, e := range p.endpoints {
		s, l := e.currentStatus(), e.server.list.Load()
		s.Devices, s.Healthy = len(l.devices), l.healthy
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.Resource, b.Resource) })
	return all
}

// Ready returns nil if there are resources, and all are registered and watched. Otherwise the error names those that
// are not.
func (p *Plugin) Ready() error {
	all := p.Status()
	if len(all) == 0 {
		return errors.New("no resource is served yet")
	}
	var errs []error
	for _, s := range all {
		if !s.Watched {
			errs = append(errs, fmt.Errorf("the kubelet does not watch %s: %s", s.Resource, s.Reason))
		}
	}
	return errors.Join(errs...)
}
