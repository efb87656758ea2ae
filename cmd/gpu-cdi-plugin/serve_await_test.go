package main

import (
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// A DaemonSet runs on nodes without a GPU or a driver, too. There it is ready without a device, and begins when the
// driver comes: the library first and then the kernel's module, or whole.
func TestServeAwaitsTheDriver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		without, with func(t *testing.T, n *sim.Node)
	}{
		"no driver at all": {
			func(t *testing.T, n *sim.Node) { testenv.Must(t, os.Rename(n.Root(), n.Root()+".later")) },
			func(t *testing.T, n *sim.Node) {
				testenv.Must(t, os.Remove(n.Root()))
				testenv.Must(t, os.Rename(n.Root()+".later", n.Root()))
			},
		},
		"the library is not there yet": {
			func(t *testing.T, n *sim.Node) { testenv.Must(t, os.Rename(n.Library(), n.Library()+".later")) },
			func(t *testing.T, n *sim.Node) { testenv.Must(t, os.Rename(n.Library()+".later", n.Library())) },
		},
		"the library is being copied": {
			func(t *testing.T, n *sim.Node) {
				testenv.Must(t, os.Rename(n.Library(), n.Library()+".later"))
				data, err := os.ReadFile(n.Library() + ".later")
				testenv.Must(t, err)
				testenv.Must(t, os.WriteFile(n.Library(), data[:len(data)/2], 0o755))
			},
			func(t *testing.T, n *sim.Node) { testenv.Must(t, os.Rename(n.Library()+".later", n.Library())) },
		},
		"the kernel's module is not loaded": {
			func(t *testing.T, n *sim.Node) { testenv.Must(t, n.Fail("nvmlInit", sim.AnyGPU, 9)) },
			func(t *testing.T, n *sim.Node) { testenv.Must(t, n.Clear()) },
		},
		"the driver has no GPU": {
			func(t *testing.T, n *sim.Node) {
				for i := range n.Machine().GPUs {
					testenv.Must(t, n.Remove(i))
				}
			},
			func(t *testing.T, n *sim.Node) { testenv.Must(t, n.Clear()) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0\nfail-on-init-error: false")
			c.without(t, s.node)
			testenv.Must(t, os.MkdirAll(s.node.Root(), 0o755))
			s.start()
			s.kubelet.WaitListed(gpuResource, 0, 0)
			waitFor(t, "readiness", func() bool { _, status, _ := s.get("/readyz"); return status == http.StatusOK })
			if body, status, _ := s.get("/healthz"); status != http.StatusOK {
				t.Errorf("/healthz: %d %s", status, body)
			}
			if _, err := os.Stat(s.spec); err == nil {
				t.Error("there is a spec")
			}
			process := s.process.Pid
			c.with(t, s.node)
			e := s.kubelet.WaitListed(gpuResource, 4, 0)
			s.offered(s.allocate(e, s.node.Machine().GPUs[2].UUID)...)
			if got := s.prefers(e, 2, 1, 2, 3); !slices.Equal(got, []int{2, 3}) {
				t.Errorf("GPUs %v are preferred", got)
			}
			if n := s.countMessages("there is no usable NVIDIA driver yet"); n > 1 {
				t.Errorf("the log says %d times that there is no driver", n)
			}
			if err := s.end(syscall.SIGTERM); err != nil || s.process.Pid != process {
				t.Error(err)
			}
		})
	}
}

// A spec that was there before stays as it is until the driver is known.
func TestServeKeepsASpecWhileItAwaitsTheDriver(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "fail-on-init-error: false")
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	before, err := os.ReadFile(s.spec)
	testenv.Must(t, err)
	testenv.Must(t, s.node.Fail("nvmlInit", sim.AnyGPU, 9))
	s.start()
	s.kubelet.WaitListed(gpuResource, 0, 0)
	s.signal(syscall.SIGHUP)
	waitFor(
		t,
		"the reload",
		func() bool { return strings.Contains(s.log.String(), "the configuration was read again") },
	)
	if after, err := os.ReadFile(s.spec); err != nil || string(after) != string(before) {
		t.Errorf("the spec is another: %v", err)
	}
	testenv.Must(t, s.node.Clear())
	s.kubelet.WaitListed(gpuResource, 4, 0)
}

// Without the option a node without a driver ends it, with what to do about it.
func TestServeFailsWithoutADriver(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "")
	testenv.Must(t, s.node.Fail("nvmlInit", sim.AnyGPU, 9))
	s.start()
	if err := s.ended(); err == nil || err.Error() != "exit status 10" ||
		!strings.Contains(s.log.String(), "--fail-on-init-error=false") {
		t.Errorf("it ended with %v", err)
	}
}
