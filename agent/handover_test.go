package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	handedOver = "another instance has handed over"
	standsBy   = "another instance has taken over and serves this node; this one waits for its end"
	notYet     = "another instance serves this node and does not hand over yet: "
)

// successor returns another instance on the same host, which takes over.
func (f *fixture) successor(changes ...func(*config.Config)) *fixture {
	f.t.Helper()
	o := *f.opts
	g := &fixture{
		t: f.t, node: f.node, driver: newFakeDriver(f.t, f.node), kubelet: f.kubelet, log: &testenv.Log{},
		reload: make(chan os.Signal, 1), opts: &o,
	}
	o.Config.TakeOver = true
	for _, change := range changes {
		change(&o.Config)
	}
	o.Driver, o.Reload, o.Reread = g.driver, g.reload, g.reread
	o.Log = slog.New(slog.NewTextHandler(g.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	g.next = Options{Config: o.Config, Trust: o.Trust}
	return g
}

// wants checks a response of the server for health.
func (f *fixture) wants(path string, status int, text string) {
	f.t.Helper()
	if got, body := f.get(path); got != status || !strings.Contains(body, text) {
		f.t.Errorf("%s: %d %s; want %d and %q", path, got, body, status, text)
	}
}

func TestHandOver(t *testing.T) {
	t.Parallel()
	for name, loses := range map[string]bool{"kubelet 1.37": false, "a kubelet before 1.37": true} {
		t.Run(name, func(t *testing.T) { t.Parallel(); testHandOver(t, loses) })
	}
}

// testHandOver has one instance take over from another. If the kubelet loses the new plugin with the old one, the new
// one registers again.
func testHandOver(t *testing.T, loses bool) {
	t.Helper()
	f := newFixture(t, "pcie-quad", listening, func(c *config.Config) { c.PodMetrics = true })
	f.kubelet.Loses = loses
	f.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", gpuResource, f.uuid(0)))
	f.start(Serve)
	first := f.kubelet.WaitListed(gpuResource, 4, 0)
	f.does("is cordoned", control.Request{Act: control.Cordon, Device: "2", Reason: "a fan is loud"})
	f.driver.xid(3, 79)
	f.kubelet.WaitListed(gpuResource, 2, 2)
	g := f.successor()
	g.start(Serve)
	g.logs(handedOver, 1)
	f.logs(standsBy, 1)
	f.logs("the kubelet no longer watches "+gpuResource+": the plugin stopped", 1)
	registrations := 1
	if loses {
		registrations = 2
	}
	g.logs("the kubelet watches "+gpuResource, registrations)
	g.logs("the kubelet no longer watches "+gpuResource+": the ListAndWatch stream ended", registrations-1)
	f.kubelet.WaitRegistrations(1 + registrations)
	e := g.kubelet.WaitListed(gpuResource, 2, 2)
	if names, err := g.allocate(e, g.uuid(1)); err != nil || len(names) != 1 {
		t.Errorf("Allocate returns %v, %v", names, err)
	}
	testenv.Must(t, g.preStart(e, g.uuid(1)))
	if _, err := f.allocate(first, f.uuid(0)); err == nil {
		t.Error("the old instance allocates a device")
	}
	testenv.Eventually(t, "the end of the old driver", func() bool {
		f.driver.mu.Lock()
		defer f.driver.mu.Unlock()
		return !f.driver.open
	})
	f.wants("/healthz", http.StatusOK, "ok")
	f.wants("/readyz", http.StatusOK, standsBy)
	testenv.Eventually(t, "the new instance is ready", func() bool { s, _ := g.get("/readyz"); return s == http.StatusOK })
	if _, body := f.get("/metrics"); strings.Contains(body, "gpu_cdi_plugin_device_info{") ||
		strings.Contains(body, "gpu_cdi_plugin_device_held{") ||
		strings.Contains(body, `stream_connected{resource="nvidia.com/gpu"} 1`) {
		t.Error("the old instance has metrics of devices")
	}
	g.does("is uncordoned", control.Request{Act: control.Uncordon, Device: "2"})
	g.kubelet.WaitListed(gpuResource, 3, 1)
	f.stop()
	testenv.Must(t, f.result())
	g.runs()
	g.kubelet.WaitListed(gpuResource, 3, 1)
}

// The old instance does not serve beside another one, and is started again when that has ended.
func TestTheOldInstanceServesAgainWhenTheNewOneHasEnded(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", func(c *config.Config) { c.TakeOver = true })
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	g := f.successor()
	g.start(Serve)
	f.logs(standsBy, 1)
	g.kubelet.WaitListed(gpuResource, 4, 0)
	g.stop()
	testenv.Must(t, g.result())
	if err := f.result(); !errors.Is(err, ErrSuccessorEnded) {
		t.Errorf("it ends with %v", err)
	}
	again := f.successor()
	again.start(Serve)
	again.logs("the kubelet watches "+gpuResource, 1)
	again.kubelet.WaitListed(gpuResource, 4, 0)
}

// Another instance must not open the driver, and so does not take over.
func TestNoHandOverWhileTheDriverIsClosed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		begin func(f *fixture) (end func())
		want  string
	}{
		"it is released": {
			func(f *fixture) func() {
				f.does("is released", toRelease)
				return func() { f.does("is opened again", toReopen) }
			},
			"no instance can take over until the driver is no longer released",
		},
		"a GPU is being reset": {
			func(f *fixture) func() {
				closing, reset := make(chan struct{}), make(chan struct{})
				f.driver.set(func() {
					f.driver.closing = func(context.Context) error { close(closing); <-reset; return errors.New("it is in use") }
				})
				go func() { _, _ = f.send(control.Request{Act: control.Reset, Device: "1"}) }()
				<-closing
				return func() { close(reset) }
			},
			"no instance can take over until the reset of a GPU has ended or counts as hung",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad", listening)
			f.start(Serve)
			e := f.kubelet.WaitListed(gpuResource, 4, 0)
			end := c.begin(f)
			g := f.successor()
			g.start(Serve)
			g.logs(notYet+c.want, 1)
			g.wants("/healthz", http.StatusOK, "ok")
			g.wants("/readyz", http.StatusServiceUnavailable, notYet+c.want)
			f.wants("/readyz", http.StatusOK, "ok")
			if _, err := f.allocate(e, f.uuid(2)); err != nil || g.driver.reads > 0 || f.kubelet.Registrations() != 1 {
				t.Errorf("Allocate: %v; the new driver was read %d times; %d registrations",
					err, g.driver.reads, f.kubelet.Registrations())
			}
			end()
			g.logs("the kubelet watches "+gpuResource, 1)
			g.kubelet.WaitListed(gpuResource, 4, 0)
			f.logs(standsBy, 1)
		})
	}
}

// An instance that cannot serve does not take over.
func TestAnInstanceThatCannotServeDoesNotTakeOver(t *testing.T) {
	t.Parallel()
	noDriver := func(g *fixture) { g.driver.set(func() { g.driver.err = fmt.Errorf("load: %w", gpu.ErrNoDriver) }) }
	for name, c := range map[string]struct {
		given func(g *fixture)
		want  string
	}{
		"without a driver": {noDriver, "take over from another instance: load: "},
		"a hook that is not root's": {
			func(g *fixture) { g.opts.Trust = fakeTrust{hook: errors.New("the hook is not root's")} }, "the hook is not root's",
		},
		"a directory that is not root's": {
			func(g *fixture) {
				g.opts.Trust = fakeTrust{dirs: map[string]error{"state-dir": errors.New("not root's")}}
			},
			"not root's",
		},
		"no option": {func(g *fixture) { g.opts.Config.TakeOver = false }, fileio.ErrHeld.Error()},
		"too many devices": {
			func(g *fixture) { inReplicas(50000)(&g.opts.Config) }, "a list of 200000 devices",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad")
			f.start(Serve)
			e := f.kubelet.WaitListed(gpuResource, 4, 0)
			g := f.successor()
			c.given(g)
			g.start(Serve)
			wantError(t, g.result(), c.want)
			if _, err := f.allocate(e, f.uuid(1)); err != nil || f.kubelet.Registrations() != 1 {
				t.Errorf("Allocate: %v; %d registrations", err, f.kubelet.Registrations())
			}
			// The new one does not keep the driver open.
			testenv.Eventually(t, "the driver can be released", func() bool { _, err := f.send(toRelease); return err == nil })
			f.runs()
		})
	}
	t.Run("a driver that it waits for", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, "pcie-quad")
		f.start(Serve)
		f.kubelet.WaitListed(gpuResource, 4, 0)
		g := f.successor(func(c *config.Config) { c.FailOnInitError = false })
		noDriver(g)
		g.start(Serve)
		g.logs(notYet+"this instance can use the driver, and the one that would take over cannot", 1)
		f.runs()
		f.driver.set(func() { f.driver.err = gpu.ErrNoDriver })
		f.reconfigure(func(*config.Config) {}) // has the GPUs read again
		g.logs(handedOver, 1)                  // since neither can use the driver
		f.logs(standsBy, 1)
		g.driver.set(func() { g.driver.err = nil })
		g.kubelet.WaitListed(gpuResource, 4, 0)
	})
}

// lockDescriptors locks the files that describe devices, like another instance.
func (f *fixture) lockDescriptors() *fileio.Lock {
	f.t.Helper()
	dir := DescriptorDir(&f.opts.Config)
	testenv.Must(f.t, os.MkdirAll(dir, 0o755))
	lock, err := fileio.AcquireLock(filepath.Join(dir, ".lock"))
	testenv.Must(f.t, err)
	return lock
}

// An instance that is ending does not answer. The other one waits for its locks.
func TestAnInstanceThatIsEndingIsWaitedFor(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	lock := f.lockDescriptors()
	g := f.successor(listening)
	g.start(Serve)
	g.logs("metrics and health are served on", 1)
	g.wants("/healthz", http.StatusOK, "ok")
	testenv.Eventually(t, "it waits", func() bool {
		_, body := g.get("/readyz")
		return strings.Contains(body, "is about to hand over")
	})
	testenv.Must(t, lock.Release())
	g.kubelet.WaitListed(gpuResource, 4, 0)
}

func TestALockWhoseHolderNeverAnswersIsAnError(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	lock := f.lockDescriptors()
	defer func() { testenv.Must(t, lock.Release()) }()
	synctest.Test(t, func(t *testing.T) {
		d := &daemon{
			opts: f.opts, takesOver: true,
			node: node.New(node.Options{
				Host: f.opts.Host, Source: f.driver, DescriptorDir: DescriptorDir(&f.opts.Config), Log: f.opts.Log,
			}),
		}
		began := time.Now()
		err := d.takeOver(t.Context())
		if took := time.Since(began); !errors.Is(err, fileio.ErrHeld) || took < endingLimit || took > 2*endingLimit {
			t.Errorf("%v after %s", err, took)
		}
	})
}

// An instance stands by as long as the other one has the files.
func TestStandingByLastsUntilTheOtherEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	lock := f.lockDescriptors()
	synctest.Test(t, func(t *testing.T) {
		d := &daemon{
			opts: f.opts, metrics: metrics.New(metrics.BuildInfo{}), systemd: sdnotify.New(nil),
			node: node.New(node.Options{
				Host: f.opts.Host, Source: f.driver, DescriptorDir: DescriptorDir(&f.opts.Config), Log: f.opts.Log,
			}),
		}
		ended := make(chan error, 1)
		go func() { ended <- d.standBy(t.Context()) }()
		time.Sleep(10*standByPoll + standByPoll/2)
		synctest.Wait()
		if len(ended) > 0 {
			t.Fatalf("it ends with %v", <-ended)
		}
		testenv.Must(t, lock.Release())
		time.Sleep(standByPoll)
		synctest.Wait()
		if len(ended) == 0 {
			t.Fatal("it stands by although the other one has ended")
		}
		if err := <-ended; !errors.Is(err, ErrSuccessorEnded) {
			t.Errorf("error %v", err)
		}
	})
}

// While an instance is about to take over, no GPU is reset. If it goes away, everything is as before.
func TestAnInstanceThatGoesAwayDoesNotKeepTheDriverOpen(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	e := f.kubelet.WaitListed(gpuResource, 4, 0)
	f.refuses("the driver is not held open", control.Request{Act: control.HandOver})
	ctx, cancel := context.WithCancel(t.Context())
	held, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := control.Send(ctx, f.opts.Config.RuntimeDir, control.Request{Act: control.HoldOpen},
			func(string) { close(held) })
		ended <- err
	}()
	<-held
	f.refuses("another instance is already taking over", control.Request{Act: control.HoldOpen})
	f.refuses("the driver cannot be closed now", toRelease)
	cancel()
	wantError(t, <-ended, context.Canceled.Error())
	testenv.Eventually(t, "the driver can be released", func() bool { _, err := f.send(toRelease); return err == nil })
	f.does("is opened again", toReopen)
	if _, err := f.allocate(e, f.uuid(1)); err != nil {
		t.Error(err)
	}
	f.runs()
}

// However many instances take over, one serves.
func TestOneOfSeveralInstancesServes(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	all := []*fixture{f}
	for range 3 {
		all = append(all, f.successor())
		all[len(all)-1].start(Serve)
	}
	testenv.Eventually(t, "three of four stand by", func() bool {
		n := 0
		for _, one := range all {
			n += one.logged(standsBy)
		}
		return n == 3
	})
	for _, one := range all {
		if one.logged(standsBy) == 0 {
			one.kubelet.WaitListed(gpuResource, 4, 0)
			one.does("is cordoned", control.Request{Act: control.Cordon, Device: "2", Reason: "x"})
			one.kubelet.WaitListed(gpuResource, 3, 1)
		}
		one.runs()
	}
}

// The ledger of the new instance has the containers that got their devices from the old one.
func TestTheNewInstanceKnowsWhatContainersHold(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	f.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", gpuResource, f.uuid(1)))
	g := f.successor(func(c *config.Config) {
		inReplicas(2)(c)
		c.Sharing.TimeSlicing.Resources[0].Rename = "acme.com/shared"
	})
	g.start(Serve)
	g.kubelet.WaitListed("acme.com/shared", 6, 2)
}

// An instance that takes over may be killed at any time, also before the old one knows that it hands over.
func TestTheHolderIsGoneBeforeTheHandOverBegins(t *testing.T) {
	h := newHandOver(nil, nil, nil, slog.New(slog.DiscardHandler))
	gone := make(chan struct{})
	close(gone)
	go func() { h.requests <- gone }()
	if err := h.run(t.Context()); !errors.Is(err, errHandedOver) {
		t.Errorf("error %v", err)
	}
	h.awaitOther(t.Context())
	if _, err := h.hold(t.Context(), func(string) {}); !errors.Is(err, errHandedOver) {
		t.Errorf("a third instance: %v", err)
	}
}

// controlServer answers hold-open and hand-over as another program does.
func (f *fixture) controlServer(answer http.HandlerFunc) {
	f.t.Helper()
	path := control.SocketPath(f.opts.Config.RuntimeDir)
	testenv.Must(f.t, os.MkdirAll(filepath.Dir(path), 0o755))
	l, err := net.Listen("unix", path)
	testenv.Must(f.t, err)
	server := &http.Server{Handler: answer, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	f.t.Cleanup(func() { _ = server.Close() })
}

func TestAnInstanceThatDoesNotHandOver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		ends   string
		waits  string
	}{
		"an older version": {
			answer: func(w http.ResponseWriter, _ *http.Request) {
				http.Error(w, `the request is invalid: unknown act "hold-open"`, http.StatusBadRequest)
			},
			ends: "take over from another instance: another version of this program runs, which does not know the request",
		},
		"it hangs": {
			answer: func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				<-r.Context().Done()
			},
			waits: "timeout awaiting response headers",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad")
			dir := DescriptorDir(&f.opts.Config)
			testenv.Must(t, os.MkdirAll(dir, 0o755))
			lock, err := fileio.AcquireLock(filepath.Join(dir, ".lock"))
			testenv.Must(t, err)
			f.controlServer(c.answer)
			g := f.successor()
			g.start(Serve)
			if c.ends != "" {
				wantError(t, g.result(), c.ends)
				testenv.Must(t, lock.Release())
				return
			}
			testenv.Eventually(t, "the warning", func() bool { return g.logged(c.waits) > 0 })
			testenv.Must(t, lock.Release()) // as when it is killed
			g.kubelet.WaitListed(gpuResource, 4, 0)
		})
	}
}

// What an instance has read before the other one refused to hand over may have changed when it serves.
func TestAnInstanceThatDidNotTakeOverReadsTheNodeAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	lock := f.lockDescriptors()
	g := f.successor()
	f.controlServer(func(w http.ResponseWriter, r *http.Request) {
		var request control.Request
		testenv.Must(t, json.NewDecoder(r.Body).Decode(&request))
		if request.Act == control.HoldOpen {
			_, _ = io.WriteString(w, `{"progress":"the driver stays open"}`+"\n")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return
		}
		g.driver.set(func() { // two GPUs are unplugged
			s := &g.driver.snapshot
			s.Devices, s.Links = s.Devices[:2], s.Links[:1]
		})
		testenv.Must(t, lock.Release())
		_, _ = io.WriteString(w, `{"error":"not now"}`+"\n")
	})
	g.start(Serve)
	g.kubelet.WaitListed(gpuResource, 2, 0)
	g.logs("the kubelet watches "+gpuResource, 1)
	if g.logged("devices=4") > 0 {
		t.Error("it has offered the GPUs that it had read before")
	}
}

// A signal ends an instance that waits.
func TestAWaitingInstanceEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	f.does("is released", toRelease)
	g := f.successor()
	g.start(Serve)
	g.logs(notYet+"no instance can take over until the driver is no longer released", 1)
	g.stop()
	testenv.Must(t, g.result())
	f.runs()
}
