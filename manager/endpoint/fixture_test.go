package endpoint_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	gpu      = "example.com/gpu"
	patience = time.Minute // ends a test that fails
)

// bed is a registry with what it has reported.
type bed struct {
	*endpoint.Registry
	t        testing.TB
	dir      string
	registry string // the directory of the plugin watcher

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each report and each line of the log
	history []report
	log     strings.Builder

	onChange func() // runs in each OnChange
}

// report is a call of OnChange, or of OnGone with Gone.
type report struct {
	model.Resource
	Gone bool
}

// start starts a registry in a directory of its own. What o leaves open is set.
func start(t testing.TB, o endpoint.Options) *bed {
	t.Helper()
	b := &bed{t: t, changed: make(chan struct{})}
	dir, err := os.MkdirTemp("", "manager") //nolint:usetesting // t.TempDir may be too long for the path of a socket
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b.dir, b.registry = filepath.Join(dir, "device-plugins"), filepath.Join(dir, "plugins_registry")
	if o.SocketDir == "" {
		o.SocketDir = b.dir
	}
	b.dir = o.SocketDir
	if o.RegistryDir == "watch" {
		o.RegistryDir = b.registry
	}
	o.Log = slog.New(slog.NewTextHandler(logWriter{b}, nil))
	o.OnChange = func(r model.Resource) {
		if b.onChange != nil {
			b.onChange()
		}
		b.report(report{Resource: r})
	}
	o.OnGone = func(name string) { b.report(report{Resource: model.Resource{Name: name}, Gone: true}) }
	if b.Registry, err = endpoint.Start(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (b *bed) change(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *bed) report(r report) { b.change(func() { b.history = append(b.history, r) }) }

type logWriter struct{ *bed }

func (w logWriter) Write(p []byte) (int, error) {
	w.change(func() { w.log.Write(p) })
	return len(p), nil
}

// logged is how often the log has a text.
func (b *bed) logged(text string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.log.String(), text)
}

// reports are those of a resource so far.
func (b *bed) reports(resource string) []report {
	b.mu.Lock()
	defer b.mu.Unlock()
	var own []report
	for _, r := range b.history {
		if r.Name == resource {
			own = append(own, r)
		}
	}
	return own
}

// resources are those that were reported and are not gone, in the order of their names.
func (b *bed) resources() []model.Resource {
	b.mu.Lock()
	defer b.mu.Unlock()
	last := map[string]report{}
	for _, r := range b.history {
		last[r.Name] = r
	}
	var all []model.Resource
	for _, name := range slices.Sorted(maps.Keys(last)) {
		if r := last[name]; !r.Gone {
			all = append(all, r.Resource)
		}
	}
	return all
}

// await waits until a condition holds, which reports or the log make true.
func (b *bed) await(what string, holds func() bool) {
	b.t.Helper()
	limit := time.After(patience)
	for {
		b.mu.Lock()
		changed := b.changed
		b.mu.Unlock()
		if holds() {
			return
		}
		select {
		case <-changed:
		case <-limit:
			b.t.Fatalf("never: %s; the resource was %s, and the log is\n%s", what, counts(b.reports(gpu)), b.log.String())
		}
	}
}

// wait waits until the newest report of a resource fits.
func (b *bed) wait(resource, what string, fit func(report) bool) {
	b.t.Helper()
	b.await(resource+" is "+what, func() bool {
		own := b.reports(resource)
		return len(own) > 0 && fit(own[len(own)-1])
	})
}

// waitLog waits until the log has a text n times.
func (b *bed) waitLog(text string, n int) {
	b.t.Helper()
	b.await(fmt.Sprintf("%d times in the log: %s", n, text), func() bool { return b.logged(text) >= n })
}

// gone is what the log has after the end of a plugin was noticed.
const gone = "the device plugin is gone"

// waitFor waits until a resource has so many devices, and so many healthy ones.
func (b *bed) waitFor(resource, count string) {
	b.t.Helper()
	b.wait(resource, count, func(r report) bool { return r.count() == count })
}

// count says how many devices are healthy, or that the resource is gone.
func (r report) count() string {
	if r.Gone {
		return "gone"
	}
	healthy := 0
	for _, d := range r.Devices {
		if d.Healthy {
			healthy++
		}
	}
	return fmt.Sprintf("%d of %d healthy", healthy, len(r.Devices))
}

func counts(reports []report) []string {
	all := []string{}
	for _, r := range reports {
		all = append(all, r.count())
	}
	return all
}

// serve starts a plugin at a socket beside the registry's. It does not register.
func (b *bed) serve(socket string, p *plugintest.Plugin) *plugintest.Plugin {
	b.t.Helper()
	testenv.Must(b.t, p.Serve(filepath.Join(b.dir, socket)))
	b.t.Cleanup(p.Stop)
	return p
}

// socket is the path of the registry's socket.
func (b *bed) socket() string { return filepath.Join(b.dir, endpoint.SocketName) }

func (b *bed) register(p *plugintest.Plugin) {
	b.t.Helper()
	testenv.Must(b.t, p.Register(b.t.Context(), b.socket()))
}

// endpoint is the endpoint in effect.
func (b *bed) endpoint(resource string) *endpoint.Endpoint {
	b.t.Helper()
	e, err := b.Endpoint(resource)
	testenv.Must(b.t, err)
	return e
}

// allocate allocates a device and fails the test if that fails.
func (b *bed) allocate(id string) {
	b.t.Helper()
	if _, err := b.endpoint(gpu).Allocate(b.t.Context(), []string{id}); err != nil {
		b.t.Fatal(err)
	}
}

// connect starts and registers a plugin with n healthy devices, and waits until they are reported.
func (b *bed) connect(socket string, n int) *plugintest.Plugin {
	b.t.Helper()
	p := b.serve(socket, plugintest.New(gpu, plugintest.Devices(n)...))
	b.register(p)
	b.waitFor(gpu, fmt.Sprintf("%d of %d healthy", n, n))
	return p
}

// waitCalls waits until the calls of a plugin fit.
func (b *bed) waitCalls(p *plugintest.Plugin, fit func(plugintest.Calls) bool) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	testenv.Must(b.t, p.WaitCalls(ctx, fit))
}

// request is a registration without faults.
func request(resource, socket string) *v1beta1.RegisterRequest {
	return &v1beta1.RegisterRequest{Version: v1beta1.Version, ResourceName: resource, Endpoint: socket}
}
