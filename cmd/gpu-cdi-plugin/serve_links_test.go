package main

import (
	"log/slog"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
)

// newTestDriver is the driver of a simulated node.
func newTestDriver(t *testing.T, machine string) (*nodeDriver, *sim.Node, *logged) {
	t.Helper()
	node, log := simtest.Node(t, machine), &logged{}
	h, err := host.New(node.Root(), "", "")
	mustDo(t, err)
	d := &nodeDriver{
		host: h, check: func(string) error { return nil }, timeout: 10 * time.Second, answered: func() {},
		log: slog.New(slog.NewTextHandler(log, nil)),
	}
	t.Cleanup(func() { _ = d.Close() })
	return d, node, log
}

func snapshotOf(t *testing.T, d *nodeDriver) *gpu.Snapshot {
	t.Helper()
	s, err := d.Snapshot(t.Context())
	mustDo(t, err)
	return s
}

// A process can load one driver library, so all that needs one here is one test.
func TestLinksOfANode(t *testing.T) {
	d, node, log := newTestDriver(t, "dgx1-v100")
	want, err := node.Snapshot()
	mustDo(t, err)
	if diff := cmp.Diff(want.Links, snapshotOf(t, d).Links); diff != "" {
		t.Errorf("the first links (-want +got):\n%s", diff)
	}

	// A GPU that comes or goes gives other indices to those behind it.
	mustDo(t, node.Remove(2))
	_ = d.Close() // as when the kernel's module shows it
	want, err = node.Snapshot()
	mustDo(t, err)
	if diff := cmp.Diff(want.Links, snapshotOf(t, d).Links); diff != "" {
		t.Errorf("the links without GPU 2 (-want +got):\n%s", diff)
	}
	mustDo(t, node.Clear())
	_ = d.Close()
	if got := snapshotOf(t, d).Links; len(got) != 28 {
		t.Errorf("%d links, want 28", len(got))
	}

	// Calls that hang do not pile up, delay nothing again, are logged once, and leave the last answers valid.
	mustDo(t, node.Hang("nvmlDeviceGetNvLinkState", sim.AnyGPU))
	before := runtime.NumGoroutine()
	for range 3 {
		d.links.read = time.Time{} // as if the last time was long ago
		if got := snapshotOf(t, d); len(got.Links) != 28 || !got.Devices[7].Usable() || got.Links[0].NVLinks == 0 {
			t.Errorf("%d links, the first is %+v, GPU 7 is %+v", len(got.Links), got.Links[0], got.Devices[7])
		}
	}
	if got := runtime.NumGoroutine(); got > before+8 {
		t.Errorf("%d goroutines, %d before; want one more for each GPU at most", got, before)
	}
	mustDo(t, node.Clear())
	waitFor(t, "the end of the calls", func() bool { return !d.lib.Hangs() })

	// What was never known is asked again when the calls have returned.
	_ = d.Close()
	d.links = nodeLinks{}
	mustDo(t, node.Hang("nvmlDeviceGetNvLinkState", 6))
	for range 3 {
		if got := snapshotOf(t, d); len(got.Links) != 28 || got.Links[0].NVLinks == 0 {
			t.Errorf("%d links, the first is %+v", len(got.Links), got.Links[0])
		}
	}
	if n := strings.Count(log.String(), "the driver does not say how GPU"); n != 1 || !strings.Contains(log.String(), node.Machine().GPUs[6].UUID) {
		t.Errorf("it was said %d times:\n%s", n, log)
	}
	mustDo(t, node.Clear())
	waitFor(t, "the links", func() bool { return cmp.Equal(snapshotOf(t, d).Links, linksOf(t, node)) })
}

func linksOf(t *testing.T, node *sim.Node) []gpu.Link {
	t.Helper()
	s, err := node.Snapshot()
	mustDo(t, err)
	return s.Links
}

// Reading links takes as long as the driver lets it, here for ever. What happens to the GPUs meanwhile is seen at once.
func TestServeReconcilesWhileLinksHang(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	mustDo(t, s.node.Hang("nvmlDeviceGetNvLinkState", sim.AnyGPU))
	s.start()
	s.listed(gpuResource, 8, 0)
	for range 3 {
		mustDo(t, s.node.Lose(2))
		s.signal(syscall.SIGHUP)
		begin := time.Now()
		e := s.listed(gpuResource, 7, 1)
		mustDo(t, s.node.ClearGPU(2))
		s.signal(syscall.SIGHUP)
		s.listed(gpuResource, 8, 0)
		if took := time.Since(begin); took > prompt {
			t.Errorf("it took %v to notice that a GPU was lost and came back", took)
		}
		s.allocate(e, s.node.Machine().GPUs[0].UUID)
	}
	waitFor(t, "a message", func() bool { return strings.Contains(s.log.String(), "the driver does not say how GPU") })
}
