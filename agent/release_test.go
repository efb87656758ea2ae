package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

var (
	toRelease = control.Request{Act: control.Release}
	toReopen  = control.Request{Act: control.Reopen}
)

func TestReleaseAndReopen(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	e := f.kubelet.WaitListed(gpuResource, 4, 0)
	f.refuses("the NVIDIA driver is not released", toReopen)
	for round := 1; round <= 2; round++ {
		f.does("the NVIDIA driver is released; open it again with: gpu-cdi-plugin device reopen", toRelease)
		f.logs("the NVIDIA driver is released: its devices stay advertised", round)
		if !f.driver.Released() {
			t.Error("the driver is open")
		}
		f.refuses(errReleased.Error(), toRelease)
		f.refuses(errReleased.Error(), control.Request{Act: control.Reset, Device: "1"})
		wantError(t, f.preStart(e, f.uuid(1)), errReleased.Error())
		f.does("is cordoned", control.Request{Act: control.Cordon, Device: "2", Reason: "x"}) // needs no driver
		f.kubelet.WaitListed(gpuResource, 3, 1)
		f.does("is uncordoned", control.Request{Act: control.Uncordon, Device: "2"})
		f.kubelet.WaitListed(gpuResource, 4, 0)

		f.does("the NVIDIA driver is opened again", toReopen)
		f.refuses("the NVIDIA driver is not released", toReopen)
		testenv.Must(t, f.preStart(e, f.uuid(1)))
	}
}

// The module may be unloaded or replaced while the driver is released, so the service does not open it when it ends.
func TestTheEndOfTheServiceDoesNotReopenTheDriver(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	f.does("is released", toRelease)
	f.stop()
	if err := f.result(); err != nil || !f.driver.Released() {
		t.Errorf("error %v; the driver is released: %t", err, f.driver.Released())
	}
}

// runReleaser runs a releaser on a host until the test ends.
func runReleaser(t *testing.T, host *sim.Node) (*fixture, *releaser) {
	t.Helper()
	f := newFixtureOn(t, host)
	defaults := config.Default()
	devs := &devices{host: f.opts.Host, config: &current{}, log: f.opts.Log}
	devs.config.Store(&defaults)
	devs.node = node.New(node.Options{
		Host: f.opts.Host, Spec: cdi.Options{HookPath: f.opts.HookPath}, Source: f.driver, Log: f.opts.Log,
		Health: node.HealthOptions{Prober: f.driver},
		Build: func(s *gpu.Snapshot) ([]resource.Resource, []resource.Finding, error) {
			return resource.Build(s, config.Default().Config)
		},
	})
	devs.monitor = devs.node.Monitor()
	testenv.Must(t, devs.node.Start(t.Context(), func(node.State) {}))
	r := &releaser{
		host: f.opts.Host, node: devs.node, monitor: devs.monitor, changed: wake.New(), log: f.opts.Log,
		runner:   prepare.New(prepare.Options{Host: f.opts.Host, Driver: f.driver, State: devs, Log: f.opts.Log}),
		requests: make(chan *release),
	}
	go func() { _ = r.run(t.Context()) }()
	return f, r
}

// ended waits until a release has ended.
func ended(t *testing.T, r *releaser) {
	t.Helper()
	done := r.released()
	if done == nil {
		return
	}
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("the release does not end")
	}
}

func TestWhatEndsARelease(t *testing.T) {
	t.Parallel()
	const again = "the NVIDIA kernel module was loaded again, which ends the release"
	for name, c := range map[string]struct {
		do       func(*testing.T, *fixture, *releaser)
		reloaded bool // the module was loaded again, which resets the GPUs
		byItself bool // the release ended without an administrator
	}{
		"an administrator": {
			func(t *testing.T, _ *fixture, r *releaser) { testenv.Must(t, r.reopen(t.Context())) }, false, false,
		},
		"the module is loaded again at once": {
			func(t *testing.T, f *fixture, r *releaser) { reloadModule(t, f.node) }, true, true,
		},
		"the module is loaded again later": {
			func(t *testing.T, f *fixture, r *releaser) {
				load := unloadModule(t, f.node)
				time.Sleep(time.Minute) // of the test's own clock
				if r.checkOpen() == nil {
					t.Error("the release ended without the module")
				}
				load()
			}, true, true,
		},
		"an administrator, while the module is not loaded": {
			func(t *testing.T, f *fixture, r *releaser) {
				defer unloadModule(t, f.node)()
				testenv.Must(t, r.reopen(t.Context()))
			}, true, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			host := simtest.Node(t, "pcie-quad") // it is changed
			synctest.Test(t, func(t *testing.T) {
				f, r := runReleaser(t, host)
				f.driver.xid(2, 95) // only a reset heals it
				testenv.Must(t, r.release(t.Context()))
				wantError(t, r.checkOpen(), errReleased.Error())
				c.do(t, f, r)
				ended(t, r)
				testenv.Must(t, r.checkOpen())
				if f.driver.Released() {
					t.Error("the driver is not open")
				}
				f.logs("the NVIDIA driver is opened again", 1)
				if got := f.logged(again) > 0; got != c.byItself {
					t.Errorf("the log says that the module was loaded again: %t, want %t", got, c.byItself)
				}
				unhealthy := "XID 95"
				if c.reloaded {
					unhealthy = ""
				}
				wantError(t, r.monitor.CheckReset(t.Context(), f.uuid(2)), unhealthy)
			})
		})
	}
}

// A release is not made later if its caller has gone, or if the driver cannot be closed.
func TestAReleaseThatIsNotMade(t *testing.T) {
	t.Parallel()
	gone := errors.New("the client has gone")
	busy := func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	for name, c := range map[string]struct {
		closing func(context.Context) error
		want    string
	}{
		"its caller has gone while a call uses the driver": {busy, gone.Error()},
		"a call uses the driver for too long":              {busy, "deadline exceeded"},
		"the driver refuses": {
			func(context.Context) error { return errors.New("the driver is broken") }, "broken",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			host := sharedNode(t, "pcie-quad")
			synctest.Test(t, func(t *testing.T) {
				f, r := runReleaser(t, host)
				f.driver.closing = c.closing
				ctx, cancel := context.WithCancelCause(t.Context())
				result, began := make(chan error, 1), time.Now()
				go func() { result <- r.release(ctx) }()
				synctest.Wait()
				if c.want == gone.Error() {
					wantError(t, r.checkOpen(), errReleased.Error())
					cancel(gone)
				}
				wantError(t, <-result, c.want)
				if took := time.Since(began); took > 0 && c.want == gone.Error() {
					t.Errorf("the release ends %s after its caller has gone", took)
				}
				cancel(nil)
				synctest.Wait()
				testenv.Must(t, r.checkOpen())
				wantError(t, r.reopen(t.Context()), errNotReleased.Error())
				if f.driver.Released() || f.logged("the NVIDIA driver is released") > 0 {
					t.Errorf("the driver is released: %t; the log:\n%s", f.driver.Released(), f.log)
				}

				f.driver.set(func() { f.driver.closing = nil })
				testenv.Must(t, r.release(t.Context()), r.reopen(t.Context()))
			})
		})
	}
}

// No release is carried out before the actor runs, nor after its caller has gone.
func TestACallerThatHasGoneBeforeItsRelease(t *testing.T) {
	t.Parallel()
	r := &releaser{requests: make(chan *release)}
	gone := errors.New("the client has gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	wantError(t, r.release(ctx), gone.Error())
	testenv.Must(t, r.checkOpen())
	if r.released() != nil {
		t.Error("the driver is released")
	}
	wantError(t, r.reopen(t.Context()), errNotReleased.Error())
}

// unloadModule makes a host report no kernel module until load.
func unloadModule(t *testing.T, host *sim.Node) (load func()) {
	t.Helper()
	rename := func(from, to string) {
		for _, f := range []string{"sys/module/nvidia/version", "proc/driver/nvidia/version"} {
			path := filepath.Join(host.Root(), f)
			testenv.Must(t, os.Rename(path+from, path+to))
		}
	}
	rename("", ".away")
	return func() { rename(".away", "") }
}

// reloadModule unloads the kernel module of a host and loads it again, at once.
func reloadModule(t *testing.T, host *sim.Node) {
	t.Helper()
	dir := filepath.Join(host.Root(), "sys/module/nvidia")
	fresh := dir + ".fresh"
	testenv.Must(t, os.CopyFS(fresh, os.DirFS(dir)))
	testenv.Must(t, unix.Renameat2(unix.AT_FDCWD, fresh, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE))
}
