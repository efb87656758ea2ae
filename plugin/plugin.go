package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/resource"
)

// Options are how a node's devices are served.
type Options struct {
	// Dir is the kubelet's device plugin directory. The kubelet's socket is in it, kubelet.sock, and so are ours.
	Dir string
	// RegistryDir, if not empty, is the kubelet's directory of plugin sockets, plugins_registry. Then our sockets are there
	// for the kubelet to find, nothing is registered in Dir, and Dir may be empty.
	RegistryDir string
	// Allocate is how containers are given devices.
	Allocate AllocateOptions
	// RegisterTimeout is how long a kubelet may take to answer a registration; 0 is 15 seconds. The kubelet takes 10 to say
	// that it cannot reach the plugin.
	RegisterTimeout time.Duration
	// StreamGrace is how long after a registration the kubelet may take to ask for the list; 0 is 3 seconds.
	StreamGrace time.Duration
	// DrainTimeout is how long calls under way may take when Run ends; 0 is 5 seconds.
	DrainTimeout time.Duration
	// Log gets what happens; nil is slog.Default().
	Log *slog.Logger
	// Observer is told what happens; nil is nobody.
	Observer Observer
}

const (
	defaultRegisterTimeout = 15 * time.Second
	defaultStreamGrace     = 3 * time.Second
	defaultDrainTimeout    = 5 * time.Second
)

// Plugin serves the resources of a node. It is an actor: Run it once. All its methods may be called at any time from
// anywhere.
type Plugin struct {
	opts  Options
	watch *watch

	mu        sync.Mutex
	endpoints map[string]*endpoint
	waiting   []*endpoint // those that Run has not started
	wake      chan struct{}
}

// New checks the options; it touches nothing.
func New(o Options) (*Plugin, error) {
	var err error
	if o.dir() == "" {
		err = errors.New("neither a device plugin directory nor a registry directory")
	}
	if err = errors.Join(err, checkLength(o.dir()), o.Allocate.validate()); err != nil {
		return nil, fmt.Errorf("set up the device plugin: %w", err)
	}
	o.RegisterTimeout = orDefault(o.RegisterTimeout, defaultRegisterTimeout)
	o.StreamGrace = orDefault(o.StreamGrace, defaultStreamGrace)
	o.DrainTimeout = orDefault(o.DrainTimeout, defaultDrainTimeout)
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Observer == nil {
		o.Observer = nobody{}
	}
	p := &Plugin{
		opts:      o,
		watch:     newWatch(o.dir(), o.kubeletSocket(), o.Log),
		endpoints: map[string]*endpoint{},
		wake:      make(chan struct{}, 1),
	}
	p.opts.Allocate.Preference.used = p.usedSlices
	return p, nil
}

func orDefault(d, standard time.Duration) time.Duration {
	if d == 0 {
		return standard
	}
	return d
}

// dir is the directory of our sockets.
func (o *Options) dir() string {
	if o.RegistryDir != "" {
		return o.RegistryDir
	}
	return o.Dir
}

// kubeletSocket is the kubelet's own socket, or empty if it finds plugins by itself.
func (o *Options) kubeletSocket() string {
	if o.RegistryDir != "" {
		return ""
	}
	return filepath.Join(o.Dir, kubeletSocketName)
}

// Update replaces the list of every resource. A resource that is new gets an endpoint; one that is no longer there keeps
// its own with an empty list, so that the kubelet knows at once that it has no devices. When Update returns, no device
// that left its list can be allocated.
//
// An error is about the resources that it names; all others have their new list.
func (p *Plugin) Update(resources []resource.Resource) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	listed := map[string]bool{}
	for i := range resources {
		r := &resources[i]
		listed[r.Name] = true
		errs = append(errs, p.update(r))
	}
	for name, e := range p.endpoints {
		if !listed[name] {
			errs = append(errs, e.server.update(resource.Resource{Name: name}))
		}
	}
	return errors.Join(errs...)
}

func (p *Plugin) update(r *resource.Resource) error {
	if e := p.endpoints[r.Name]; e != nil {
		return e.server.update(*r)
	}
	e, err := newEndpoint(*r, &p.opts, p.watch)
	if err != nil {
		return err
	}
	p.endpoints[r.Name] = e
	p.waiting = append(p.waiting, e)
	poke(p.wake)
	return nil
}

// Check says why Run could not begin: the kubelet's directory is not there. It touches nothing.
func (p *Plugin) Check() error { return checkDir(p.opts.dir()) }

// Run serves until ctx ends, then drains and removes its sockets and locks. It returns early with an error that no
// waiting would mend: another instance serves a resource, or the directory is not there at the start. A kubelet that is
// not there is waited for.
func (p *Plugin) Run(ctx context.Context) error {
	if err := p.Check(); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.watch.run(ctx) })
	g.Go(func() error {
		for {
			for _, e := range p.takeWaiting() {
				g.Go(func() error { return e.run(ctx) })
			}
			select {
			case <-ctx.Done():
				return nil
			case <-p.wake:
			}
		}
	})
	return g.Wait()
}

func (p *Plugin) takeWaiting() []*endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.waiting
	p.waiting = nil
	return w
}

// Status is how a resource stands with the kubelet.
type Status struct {
	Resource string
	// Connected tells that the kubelet has registered the resource and reads its list.
	Connected bool
	// Registrations counts those that the kubelet accepted.
	Registrations uint64
	// Problem says why the resource is not connected, in words, if that is known.
	Problem string
	// Devices and Healthy count what is listed.
	Devices, Healthy int
}

// Status tells how each resource stands, by name.
func (p *Plugin) Status() []Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]Status, 0, len(p.endpoints))
	for _, e := range p.endpoints {
		all = append(all, e.status())
	}
	slices.SortStableFunc(all, func(a, b Status) int { return strings.Compare(a.Resource, b.Resource) })
	return all
}

// Ready is nil if there are resources and the kubelet reads the list of each. Otherwise it says what is missing.
func (p *Plugin) Ready() error {
	all := p.Status()
	if len(all) == 0 {
		return errors.New("no resource is served yet")
	}
	var errs []error
	for _, s := range all {
		if !s.Connected {
			errs = append(errs, fmt.Errorf("%s is not connected to the kubelet: %s", s.Resource, s.Problem))
		}
	}
	return errors.Join(errs...)
}

// poke wakes the reader of c; one that is not reading wakes when it does.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
