package nvml

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// newTestSession creates a simulated node and a session of it.
func newTestSession(t *testing.T, machine string) (*Session, *sim.Node, *testenv.Log) {
	t.Helper()
	node, log := createNode(t, machine), &testenv.Log{}
	session := NewSession(Options{
		Host: createNodeHost(t, node), Timeout: 20 * time.Second, GPUTimeout: 10 * time.Second,
		Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	session.eventWait = testEventWait
	t.Cleanup(func() { _ = session.Close() })
	return session, node, log
}

func takeSnapshot(t *testing.T, session *Session) *gpu.Snapshot {
	t.Helper()
	s, err := session.Snapshot(t.Context())
	testenv.Must(t, err)
	checkSnapshot(t, s)
	return s
}

func readNodeLinks(t *testing.T, node *sim.Node) []gpu.Link {
	t.Helper()
	s, err := node.Snapshot()
	testenv.Must(t, err)
	return s.Links
}

// waitForReturns waits until no call is outstanding.
func waitForReturns(t *testing.T, session *Session) {
	t.Helper()
	waitUntil(t, "all calls have returned", func() bool { return session.library.calls.outstanding() == 0 })
}

func TestLinksOfTheGPUsThatThereAre(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, _ := newTestSession(t, "dgx1-v100")
	session.opts.GPUTimeout = 0 // a snapshot waits for GPUs of a busy machine
	if diff := cmp.Diff(readNodeLinks(t, node), takeSnapshot(t, session).Links); diff != "" {
		t.Errorf("the first links (-want +got):\n%s", diff)
	}
	// A GPU that is removed or added gives other indices to those after it.
	testenv.Must(t, node.Remove(2))
	testenv.Must(t, session.Close()) // as when the kernel module shows it
	if diff := cmp.Diff(readNodeLinks(t, node), takeSnapshot(t, session).Links); diff != "" {
		t.Errorf("the links without GPU 2 (-want +got):\n%s", diff)
	}
	testenv.Must(t, node.Clear())
	testenv.Must(t, session.Close())
	if got := takeSnapshot(t, session).Links; len(got) != 28 {
		t.Errorf("%d links, want 28", len(got))
	}
}

// Calls about links that hang do not pile up, and leave the last links valid.
func TestLinksThatHangStayAsTheyWere(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, log := newTestSession(t, "dgx1-v100")
	limit := session.opts.GPUTimeout
	session.opts.GPUTimeout = 0 // a snapshot waits for GPUs of a busy machine
	before := takeSnapshot(t, session)
	session.opts.GPUTimeout = limit
	testenv.Must(t, node.Hang("nvmlDeviceGetNvLinkState", sim.AnyGPU))
	for range 3 {
		session.retained.read = time.Time{} // as if the last reading was long ago
		if diff := cmp.Diff(before, takeSnapshot(t, session)); diff != "" {
			t.Errorf("while the links hang (-before +after):\n%s", diff)
		}
	}
	if n := session.library.calls.outstanding(); n != 8 {
		t.Errorf("%d calls are outstanding, want one for each GPU", n)
	}
	if log.String() != "" {
		t.Errorf("the log has\n%s", log)
	}
	testenv.Must(t, node.Clear())
	waitForReturns(t, session)
}

// Links that could not be read are logged once, and read when the calls have returned.
func TestLinksThatHangAtFirstAreReadLater(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, log := newTestSession(t, "dgx1-v100")
	var returned atomic.Int32
	session.changed = func() { returned.Add(1) }
	testenv.Must(t, node.Hang("nvmlDeviceGetNvLinkState", 6))
	for range 3 {
		if got := takeSnapshot(t, session); len(got.Links) != 28 || got.Links[0].NVLinks == 0 {
			t.Errorf("%d links, the first is %+v", len(got.Links), got.Links[0])
		}
	}
	session.retained.read = time.Time{} // as if the last reading was long ago
	takeSnapshot(t, session)
	n := strings.Count(log.String(), "the links of GPU 6 cannot be read")
	if n != 1 || !strings.Contains(log.String(), node.Machine().GPUs[6].UUID) {
		t.Errorf("it was logged %d times:\n%s", n, log)
	}
	testenv.Must(t, node.Clear())
	waitUntil(t, "the call has returned", func() bool { return returned.Load() > 0 })
	if diff := cmp.Diff(readNodeLinks(t, node), takeSnapshot(t, session).Links); diff != "" {
		t.Errorf("the links (-want +got):\n%s", diff)
	}
}

// NVML counts the GPUs when it is initialised. The session initialises it again when there may be other GPUs.
func TestSnapshotFollowsTheGPUs(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, _ := newTestSession(t, "pcie-quad")
	session.opts.GPUTimeout = 0 // a snapshot waits for GPUs of a busy machine
	compare := func(state string, want int) {
		t.Helper()
		if got := takeSnapshot(t, session); len(got.Devices) != want {
			t.Errorf("%s: %d devices, want %d", state, len(got.Devices), want)
		}
	}
	compare("at first", 4)
	testenv.Must(t, node.Remove(1))
	compare("a GPU is removed, which the kernel does not show, and so lost", 4)
	session.opened = session.opened.Add(-reopenPause)
	compare("a minute later", 3)
	testenv.Must(t, node.Clear())
	compare("it is back, which the kernel does not show", 3)
	session.opened = session.opened.Add(-reopenPause)
	compare("a minute later", 4)
	testenv.Must(t, node.Remove(1))
	testenv.Must(t, session.Close())
	compare("a GPU is removed", 3)
	testenv.Must(t, node.Clear())
	compare("a GPU is added, which the kernel does not show yet", 3)
	testenv.Must(t, os.Mkdir(filepath.Join(node.Root(), "proc/driver/nvidia/gpus/0000:ff:00.0"), 0o755))
	compare("the kernel shows another GPU", 4)
}

// The driver may have been reloaded after an error, so NVML is initialised again.
func TestSnapshotAfterAnErrorOfTheDriver(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, _ := newTestSession(t, "workstation")
	session.opts.GPUTimeout = 0 // a snapshot waits for GPUs of a busy machine
	takeSnapshot(t, session)
	fail(t, node, "nvmlDeviceGetCount", sim.AnyGPU, nvml.ERROR_UNKNOWN)
	_, err := session.Snapshot(t.Context())
	checkError(t, err, ErrDriverFailed, "read the driver: ")
	if session.library != nil || errors.Is(err, gpu.ErrNotAnswering) {
		t.Errorf("the library is still open after %v", err)
	}
	testenv.Must(t, node.Clear())
	compareToNode(t, node, takeSnapshot(t, session))
}
