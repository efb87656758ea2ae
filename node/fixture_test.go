package node

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// nodeSource reads a simulated node without its library, of which a process can load only one.
type nodeSource struct {
	mu    sync.Mutex
	node  *sim.Node
	lost  []int  // indices of GPUs that no longer answer
	err   error  // of the driver as a whole
	only  int    // how many GPUs the driver reports, or noGPUs; 0 means all
	asked func() // is called for each snapshot; may be nil

	released atomic.Bool
}

const noGPUs = -1

func (s *nodeSource) Library() string { return s.node.Library() }

// Notify does nothing: tests call the Reconciler.
func (s *nodeSource) Notify(func(gpu.Event), func()) {}

func (s *nodeSource) Released() bool { return s.released.Load() }

func (s *nodeSource) Snapshot(context.Context) (*gpu.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asked != nil {
		s.asked()
	}
	if s.err != nil {
		return nil, s.err
	}
	snapshot, err := s.node.Snapshot()
	if err != nil {
		return nil, err
	}
	if s.only != 0 {
		snapshot.Devices = snapshot.Devices[:max(s.only, 0)]
	}
	for _, i := range s.lost {
		snapshot.Devices[i].Error = "GPU is lost"
	}
	return snapshot, nil
}

func (s *nodeSource) set(err error, lost ...int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err, s.lost = err, lost
}

// fixture is a Reconciler on a simulated node. At each publication it checks what must always hold.
type fixture struct {
	t      *testing.T
	node   *sim.Node
	source *nodeSource
	prober *fakeProber
	dirs   []string // of CDI specs, ours is the last
	path   string
	config resource.Config
	rec    *Reconciler
	sink   func(State) // what Start gets; publish unless a test sets it

	mu        sync.Mutex
	published []publication
	news      chan struct{}
}

// publication is a state, and what engines offered when it was published.
type publication struct {
	State
	offered []string
}

func newFixture(t *testing.T, machine string, change ...func(*Options)) *fixture {
	t.Helper()
	return newFixtureOn(t, simtest.Node(t, machine), change...)
}

// never is an interval that ends after the test: intervals end at multiples of them on the clock.
const never = time.Duration(math.MaxInt64)

func newFixtureOn(t *testing.T, node *sim.Node, change ...func(*Options)) *fixture {
	t.Helper()
	b := &fixture{t: t, node: node, news: make(chan struct{}, 100)}
	b.source, b.prober = &nodeSource{node: b.node}, &fakeProber{}
	b.dirs = []string{filepath.Join(t.TempDir(), "etc-cdi"), filepath.Join(t.TempDir(), "cdi")}
	b.path = filepath.Join(b.dirs[1], cdi.FileName(cdi.DefaultKind))
	b.config = resource.Config{Resource: "nvidia.com/gpu", MIGStrategy: resource.MIGMixed}
	h, err := host.New(b.node.Root(), "", "")
	testenv.Must(t, err)
	o := Options{
		Host: h, Source: b.source, Path: b.path, Dirs: b.dirs,
		Spec: cdi.Options{HookPath: "/usr/bin/prestart-hook"},
		Build: func(s *gpu.Snapshot) ([]resource.Resource, []resource.Finding, error) {
			return resource.Build(s, b.config)
		},
		Interval: never, Health: HealthOptions{Prober: b.prober},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	for _, c := range change {
		c(&o)
	}
	b.dirs, b.path = o.Dirs, o.Path
	b.rec, b.sink = New(o), b.publish
	return b
}

func (b *fixture) publish(s State) {
	offered := cdi.Load(b.dirs...).Names()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.published = append(b.published, publication{s, offered})
	for uuid, health := range reasons(s) {
		if health == "" && b.rec.opts.Path != "" && !slices.Contains(offered, cdi.DefaultKind+"="+uuid) {
			b.t.Errorf("%s is listed as healthy and is not offered by the CDI specs", uuid)
		}
	}
	for _, name := range extras(s) {
		if b.rec.opts.Path != "" && countOf(s).healthy > 0 && !slices.Contains(offered, name) {
			b.t.Errorf("%s is given to containers and is not offered by the CDI specs", name)
		}
	}
	select {
	case b.news <- struct{}{}:
	default:
	}
}

// reasons has the reason for which each device is unhealthy, by UUID; it is empty for a healthy one.
func reasons(s State) map[string]string {
	m := map[string]string{}
	for _, r := range s.Resources {
		for _, d := range r.Devices {
			m[d.UUID] = d.Reason
			if !d.Healthy && d.Reason == "" {
				m[d.UUID] = "no reason given"
			}
		}
	}
	return m
}

// count is how many devices are healthy, and how many are not.
type count struct{ healthy, unhealthy int }

func countOf(s State) (c count) {
	for _, reason := range reasons(s) {
		if reason == "" {
			c.healthy++
		} else {
			c.unhealthy++
		}
	}
	return c
}

func (b *fixture) start() {
	b.t.Helper()
	testenv.Must(b.t, b.rec.Start(b.t.Context(), b.sink))
}

// reconcile reconciles once, as Run does.
func (b *fixture) reconcile() State {
	b.t.Helper()
	testenv.Must(b.t, b.rec.reconcile(b.t.Context()))
	return b.rec.State()
}

// run runs the Reconciler until the test ends.
func (b *fixture) run() {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan error, 1)
	go func() { done <- b.rec.Run(ctx) }()
	b.t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, b.rec.Unlock()); err != nil {
			b.t.Errorf("Run: %v", err)
		}
	})
}

// wait waits until the state is as wanted.
func (b *fixture) wait(what string, wanted func(State) bool) {
	b.t.Helper()
	late := time.After(time.Minute)
	for !wanted(b.rec.State()) {
		select {
		case <-b.news:
		case <-late:
			b.t.Fatalf("%s did not happen; the state is %+v", what, reasons(b.rec.State()))
		}
	}
}

// wantDevices checks how many devices of a state are healthy and unhealthy.
func (b *fixture) wantDevices(s State, want count) {
	b.t.Helper()
	if got := countOf(s); got != want {
		b.t.Errorf("devices are %+v, want %+v: %v", got, want, reasons(s))
	}
}

// disk is the names of the devices in our spec file; none without it.
func (b *fixture) disk() []string {
	b.t.Helper()
	spec, err := cdi.ReadFile(b.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	testenv.Must(b.t, err)
	var names []string
	for _, d := range spec.Devices {
		names = append(names, d.Name)
	}
	return names
}

// foreign writes the spec of another program, with those devices.
func (b *fixture) foreign(path string, names ...string) {
	b.t.Helper()
	testenv.Must(b.t, os.MkdirAll(filepath.Dir(path), 0o755))
	spec := &specs.Spec{Version: "0.5.0", Kind: cdi.DefaultKind}
	for _, name := range names {
		spec.Devices = append(
			spec.Devices,
			specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{Env: []string{"A=B"}}},
		)
	}
	testenv.Must(b.t, cdi.WriteFile(path, spec))
}

// uuids are those of the node's GPUs.
func (b *fixture) uuids() []string {
	var list []string
	for _, g := range b.node.Machine().GPUs {
		list = append(list, g.UUID)
	}
	return list
}

// engine maps each name that the CDI library offers to the file that it is from.
func (b *fixture) engine() map[string]string {
	b.t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(b.dirs...), cdilib.WithAutoRefresh(false))
	testenv.Must(b.t, err)
	m := map[string]string{}
	for _, name := range cache.ListDevices() {
		m[name] = cache.GetDevice(name).GetSpec().GetPath()
	}
	return m
}
