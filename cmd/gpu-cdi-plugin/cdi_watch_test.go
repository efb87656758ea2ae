package main

import (
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

// An open driver keeps a GPU awake that the kernel would suspend.
func TestWatchClosesTheDriverOfGPUsThatMaySuspend(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "gpu-timeout: 1s\n")
	address := s.node.Machine().GPUs[0].Bus
	control := filepath.Join(s.node.Root(), "sys/bus/pci/devices", address, "power/control")
	testenv.Must(t, os.MkdirAll(filepath.Dir(control), 0o755))
	testenv.Must(t, os.WriteFile(control, []byte("auto\n"), 0o644))
	testenv.Must(t, s.node.Set(0, map[string]string{"persistence-mode": "0"}))
	s.startVerb(nil, "cdi", "watch")
	closed := func() bool { return !s.hasDriverOpen() }
	s.waitForDevices(s.uuids()...)
	waitFor(t, "the driver is closed", closed)

	all := s.uuids()
	testenv.Must(t, s.node.AddProcess(0, sim.Process{PID: os.Getpid(), Type: sim.ComputeProcess}))
	testenv.Must(t, os.Remove(s.spec))
	s.waitForDevices(all...)
	waitFor(t, "the driver is open while a process uses the GPU", func() bool { return !closed() })
	testenv.Must(t, s.node.XID(0, 79, nil))
	s.logs("XID 79")
	testenv.Must(t, s.node.RemoveProcess(0, os.Getpid()))
	if n := s.countMessages("were not received for"); n > 0 {
		t.Error("the log warns of missed events, although no process used the GPU")
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
