package agent

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

func listening(c *config.Config) { c.Listen = "127.0.0.1:0" }

// get asks the server of Config.Listen.
func (f *fixture) get(path string) (status int, body string) {
	f.t.Helper()
	var address string
	testenv.Eventually(f.t, "the server's address", func() bool {
		_, rest, found := strings.Cut(f.log.String(), "address=")
		address, _, _ = strings.Cut(rest, "\n")
		return found
	})
	q, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, "http://"+address+path, nil)
	testenv.Must(f.t, err)
	answer, err := http.DefaultClient.Do(q)
	testenv.Must(f.t, err)
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	testenv.Must(f.t, err)
	return answer.StatusCode, string(data)
}

// It is ready when the spec is written, not while it waits for the driver.
func TestWatchIsReadyWhenThereIsASpec(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault, mend func(*fakeDriver)
		why         string // it is not ready
	}{
		"the driver does not answer": {
			func(d *fakeDriver) { d.reading = make(chan struct{}) }, func(d *fakeDriver) { close(d.reading) },
			"the GPUs have not been read yet",
		},
		"there is no driver": {
			func(d *fakeDriver) { d.err = fmt.Errorf("%w: no module", gpu.ErrNoDriver) },
			func(d *fakeDriver) { d.err = nil },
			"there is no CDI spec: no usable NVIDIA driver: no module",
		},
		"no GPU can be read": {
			func(d *fakeDriver) { d.lose(0, 1, 2, 3) }, func(d *fakeDriver) { d.lose() },
			"there is no CDI spec: 4 of 4 GPUs could not be read",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad", listening, func(c *config.Config) { c.FailOnInitError = false })
			c.fault(f.driver)
			f.start(Watch)
			testenv.Eventually(t, "the reason: "+c.why, func() bool {
				status, body := f.get("/readyz")
				if status != http.StatusServiceUnavailable {
					t.Fatalf("/readyz: %d %s", status, body)
				}
				return strings.Contains(body, c.why)
			})
			if _, err := os.Stat(ownSpec(&f.opts.Config)); err == nil {
				t.Error("there is a spec")
			}
			f.driver.set(func() { c.mend(f.driver) })
			testenv.Eventually(t, "readiness", func() bool { status, _ := f.get("/readyz"); return status == http.StatusOK })
			if _, err := os.Stat(ownSpec(&f.opts.Config)); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestWatchIsReadyWithoutAGPU(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", listening)
	f.driver.snapshot.Devices = nil
	f.start(Watch)
	testenv.Eventually(t, "readiness", func() bool { status, _ := f.get("/readyz"); return status == http.StatusOK })
	if _, err := os.Stat(ownSpec(&f.opts.Config)); err == nil {
		t.Error("there is a spec")
	}
}

// Watch has no kubelet: the rules for the kubelet's resources, and the directories of serve's files, do not concern it.
func TestWatchReloads(t *testing.T) {
	t.Parallel()
	const restarts = "restarts"
	for name, c := range map[string]struct {
		change func(*fixture, *config.Config)
		want   string // in the log, or restarts
	}{
		"the rules of resources": {func(_ *fixture, c *config.Config) {
			c.Resource, c.GPUs.Exclude = "acme.com/gpu", []resource.Selector{"*"}
			inReplicas(50000)(c)
		}, readAgain},
		"the state directory is a file": {
			func(f *fixture, c *config.Config) { c.StateDir = f.node.Library() }, restarts,
		},
		"the state directory is not root's": {
			func(f *fixture, c *config.Config) {
				c.StateDir = "/x"
				f.next.Trust = fakeTrust{dirs: map[string]error{"state-dir": errors.New("not root's")}}
			}, restarts,
		},
		"the directory of specs is not root's": {
			func(f *fixture, _ *config.Config) {
				f.next.Trust = fakeTrust{dirs: map[string]error{"cdi-dir": errors.New("cdi-dir: not root's")}}
			}, invalid + "cdi-dir: not root's",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad", func(c *config.Config) {
				c.Resource, c.GPUs.Exclude = "acme.com/gpu", []resource.Selector{"*"}
				c.MIGStrategy = resource.MIGSingle
			})
			socket, until := testenv.Systemd(t)
			f.opts.Env = []string{"NOTIFY_SOCKET=" + socket}
			f.start(Watch)
			summary := "READY=1\nSTATUS=4 of 4 devices in " + ownSpec(&f.opts.Config)
			until(summary)
			f.reconfigure(func(changed *config.Config) { c.change(f, changed) })
			if c.want == restarts {
				if err := f.result(); !errors.Is(err, ErrRestart) {
					t.Errorf("it ends with %v, want ErrRestart", err)
				}
				return
			}
			f.logs(c.want, 1)
			until(summary)
			f.reconfigure(func(*config.Config) {}) // after a reconciliation
			until(summary)
			if n := f.logged("no longer the case: "); n > 0 || f.kubelet.Registrations() > 0 {
				t.Errorf("the rules changed the devices, or there are %d registrations", f.kubelet.Registrations())
			}
		})
	}
}

func TestWatchReportsToSystemd(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	socket, until := testenv.Systemd(t)
	f.opts.Env = []string{"NOTIFY_SOCKET=" + socket}
	f.start(Watch)
	spec := ownSpec(&f.opts.Config)
	until("READY=1\nSTATUS=4 of 4 devices in " + spec)
	other := f.writeForeign(2)
	until("STATUS=3 of 4 devices in " + spec + "; " + other)
	testenv.Must(t, os.Remove(other))
	until("STATUS=4 of 4 devices in " + spec)
	f.driver.xid(1, 95)
	until("STATUS=3 of 4 devices in " + spec)
	f.stop()
	testenv.Must(t, f.result())
	until("STOPPING=1")
}
