package main

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// newWatched starts cdi watch on a simulated node.
func newWatched(t *testing.T, machine, config string) *served {
	t.Helper()
	s := newServed(t, machine, config)
	s.startVerb(nil, "cdi", "watch")
	return s
}

// waitForDevices waits until the spec has exactly those devices, of those that are named by UUID.
func (s *served) waitForDevices(uuids ...string) {
	s.t.Helper()
	slices.Sort(uuids)
	waitFor(s.t, "a spec of "+strings.Join(uuids, ", "), func() bool {
		spec, err := cdi.ReadFile(s.spec)
		if err != nil {
			return false
		}
		var got []string
		for _, d := range spec.Devices {
			if strings.Contains(d.Name, "-") {
				got = append(got, d.Name)
			}
		}
		slices.Sort(got)
		return slices.Equal(got, uuids)
	})
}

func TestWatchKeepsTheSpecUpToDateWithoutAKubelet(t *testing.T) {
	t.Parallel()
	s := newWatched(t, "pcie-quad", "listen: 127.0.0.1:0\n")
	s.waitForDevices(s.uuids()...)

	testenv.Must(t, os.Remove(s.spec))
	s.waitForDevices(s.uuids()...)
	testenv.Must(t, os.WriteFile(s.spec, []byte("{"), 0o644))
	s.waitForDevices(s.uuids()...)
	all := s.uuids()
	testenv.Must(t, s.node.Unplug(3))
	s.signal(syscall.SIGHUP)
	s.waitForDevices(all[:3]...)

	waitFor(t, "readiness", func() bool { _, status := s.ask("/readyz"); return status == http.StatusOK })
	body, _ := s.ask("/metrics")
	for _, line := range []string{
		`gpu_cdi_plugin_devices{health="healthy",resource="nvidia.com/gpu"} 3`, "gpu_cdi_plugin_spec_stale 0",
	} {
		if !strings.Contains(body, line+"\n") {
			t.Errorf("the metrics lack %s", line)
		}
	}
	if n := s.kubelet.Registrations(); n > 0 {
		t.Errorf("%d registrations with the kubelet", n)
	}
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	s.waitForDevices(all[:3]...) // the spec stays
}

func TestWatchFollowsMIGChanges(t *testing.T) {
	t.Parallel()
	s := newWatched(t, "dgx-h100", "")
	s.waitForDevices(s.uuids()...)
	testenv.Must(t, s.node.SetMIG(1, []string{"1g.10gb"}))
	waitFor(t, "a MIG device in the spec", func() bool {
		spec, err := cdi.ReadFile(s.spec)
		if err != nil {
			return false
		}
		for _, d := range spec.Devices {
			if d.Name == "1:0" {
				return true
			}
		}
		return false
	})
	if log := strings.Join(s.messages(), "\n"); strings.Contains(log, "mig-strategy") {
		t.Errorf("the log mentions an option that this verb does not have:\n%s", log)
	}
}

func TestWatchAndServeDoNotWriteOneSpec(t *testing.T) {
	t.Parallel()
	s := newWatched(t, "workstation", "")
	s.waitForDevices(s.uuids()...)
	first := *s
	s.startVerb(nil, "cdi", "watch")
	if err := s.ended(); err == nil || err.Error() != "exit status 12" {
		t.Errorf("a second cdi watch ends with %v, want exit status 12", err)
	}
	s.start()
	if err := s.ended(); err == nil || err.Error() != "exit status 12" {
		t.Errorf("serve beside cdi watch ends with %v, want exit status 12", err)
	}
	if err := first.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
}

// It is ready when the spec is written, not while it waits for the driver.
func TestWatchIsNotReadyWithoutASpec(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config, reason string
		fault          func(*sim.Node) error
	}{
		"the driver hangs": {
			"", "the GPUs have not been read yet",
			func(n *sim.Node) error { return n.Hang("nvmlInit", sim.AnyGPU) },
		},
		"there is no driver": {
			"fail-on-init-error: false", "there is no CDI spec: ",
			func(n *sim.Node) error { return n.Fail("nvmlInit", sim.AnyGPU, 9) },
		},
		"no GPU can be read": {
			"gpu-timeout: 3s", "there is no CDI spec: 4 of 4 GPUs could not be read",
			func(n *sim.Node) error {
				var errs []error
				for i := range n.Machine().GPUs {
					errs = append(errs, n.Lose(i))
				}
				return errors.Join(errs...)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0\n"+c.config)
			testenv.Must(t, c.fault(s.node))
			s.startVerb(nil, "cdi", "watch")
			waitFor(t, "a reason", func() bool {
				body, status, _ := s.get("/readyz")
				if status != http.StatusServiceUnavailable {
					t.Fatalf("/readyz: %d %s", status, body)
				}
				return strings.Contains(body, c.reason)
			})
			testenv.Must(t, s.node.Clear())
			waitFor(t, "readiness", func() bool { _, status, _ := s.get("/readyz"); return status == http.StatusOK })
			s.waitForDevices(s.uuids()...)
		})
	}
}

// A node without a GPU needs no spec.
func TestWatchIsReadyWithoutAGPU(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "listen: 127.0.0.1:0")
	testenv.Must(t, s.node.Remove(0))
	s.startVerb(nil, "cdi", "watch")
	waitFor(t, "readiness", func() bool { _, status, _ := s.get("/readyz"); return status == http.StatusOK })
}

// It has no kubelet: the configuration's rules for the kubelet's resources do not concern it.
func TestWatchIgnoresTheRulesOfResources(t *testing.T) {
	t.Parallel()
	const rules = "listen: 127.0.0.1:0\nresource: example.com/gpu\ngpus: {exclude: ['*']}\nmig-strategy: single\n"
	s := newWatched(t, "pcie-quad", rules)
	s.waitForDevices(s.uuids()...)
	healthy := func() bool {
		body, _, _ := s.get("/metrics")
		return strings.Contains(body, `gpu_cdi_plugin_devices{health="healthy",resource="nvidia.com/gpu"} 4`+"\n")
	}
	waitFor(t, "4 healthy devices", healthy)

	s.configure(rules + "sharing: {time-slicing: {resources: [{name: example.com/gpu, replicas: 50000}]}}\n")
	s.reconcile() // which waits for the reload
	s.reconcile() // and for a reconciliation with its rules
	if !healthy() || s.countMessages("no longer the case: ") > 0 {
		t.Error("the rules for the kubelet's resources changed the devices")
	}
}

// The directories of serve's files do not concern it.
func TestWatchReloadsWithoutTheDirectoriesOfServe(t *testing.T) {
	t.Parallel()
	s := newWatched(t, "workstation", "")
	s.waitForDevices(s.uuids()...)
	unused := filepath.Join(s.dir, "unused")
	for i, dir := range []string{s.config, unused} { // the first one is a file, in which no directory can be made
		s.configure("state-dir: " + dir + "\n")
		s.signal(syscall.SIGHUP)
		waitFor(t, "a restart", func() bool { return s.countMessages("restarting: ") == i+1 })
		testenv.Must(t, os.Remove(s.spec))
		s.waitForDevices(s.uuids()...) // the new program has read the configuration
	}
	if _, err := os.Stat(unused); err == nil {
		t.Errorf("it made %s", unused)
	}

	s.configure("cdi-dir: [\n")
	s.signal(syscall.SIGHUP)
	waitFor(t, "a refusal", func() bool {
		return s.countMessages("the configuration is invalid, and the old one stays in use") == 1
	})
}

func TestWatchReportsToSystemd(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	address, until := testenv.Systemd(t)
	s.startVerb([]string{"NOTIFY_SOCKET=" + address}, "cdi", "watch")
	until("READY=1\nSTATUS=4 of 4 devices in " + s.spec)
	other := s.writeForeign(cdi.DefaultKind, s.uuids()[2])
	until("STATUS=3 of 4 devices in " + s.spec + "; " + other)
	testenv.Must(t, os.Remove(other))
	until("STATUS=4 of 4 devices in " + s.spec)
	dir := filepath.Dir(s.spec)
	waitFor(t, "a file in the directory's place", func() bool { // watch makes the directory again
		return errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)) == nil
	})
	until("STATUS=0 of 4 devices in " + s.spec)
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	until("STOPPING=1")
}
