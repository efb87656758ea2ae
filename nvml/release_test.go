package nvml

import (
	"context"
	"errors"
	"testing"
	"time"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestRelease(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "pcie-quad")
	session := NewSession(Options{Host: createNodeHost(t, node)})
	t.Cleanup(func() { testenv.Must(t, session.Close()) })
	changed := 0
	session.Notify(nil, func() { changed++ })
	before, err := session.Snapshot(t.Context())
	testenv.Must(t, err)
	uuid := before.Devices[1].UUID
	testenv.Must(t, session.Release(t.Context()))
	if session.library != nil || len(InFlight()) > 0 {
		t.Errorf("the library is open: %v", InFlight())
	}
	if err := session.Open(t.Context()); !errors.Is(err, ErrReleased) {
		t.Errorf("open: %v", err)
	}
	if _, err := session.Use(t.Context(), uuid); !errors.Is(err, ErrReleased) {
		t.Errorf("use: %v", err)
	}
	if probes, err := session.Probes(t.Context()); len(probes) > 0 || err != nil {
		t.Errorf("probes %v, error %v", probes, err)
	}
	if now, err := session.Snapshot(t.Context()); now != before || err != nil {
		t.Errorf("snapshot %v, error %v", now, err)
	}
	testenv.Must(t, session.Release(t.Context()))
	if changed > 0 {
		t.Error("what may have changed is reported before the library is open again")
	}
	testenv.Must(t, session.Reopen(t.Context()))
	if changed != 1 {
		t.Errorf("reported %d times that the GPUs may have changed while the library was closed", changed)
	}
	if _, err := session.Use(t.Context(), uuid); err != nil {
		t.Error(err)
	}
	now, err := session.Snapshot(t.Context())
	testenv.Must(t, err)
	compareToNode(t, node, now)
}

// A driver whose library does not close or open is not released: it may have the GPUs open.
func TestReleaseWaitsForShutdown(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "pcie-quad")
	session := NewSession(Options{Host: createNodeHost(t, node)})
	testenv.Must(t, session.Open(t.Context()))
	for _, function := range []string{"nvmlShutdown", "nvmlInit_v2"} {
		testenv.Must(t, node.Hang(function, sim.AnyGPU))
		session.opts.Timeout = 100 * time.Millisecond
		_ = session.Open(t.Context())
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if err := session.Release(ctx); err == nil {
			t.Errorf("released while %v", InFlight())
		}
		session.opts.Timeout = DefaultTimeout
		testenv.Must(t, node.Clear())
		testenv.Must(t, session.Release(t.Context()))
		if calls := InFlight(); len(calls) > 0 {
			t.Errorf("released while %v", calls)
		}
		testenv.Must(t, session.Reopen(t.Context()))
		testenv.Must(t, session.Close())
	}
}

// A driver that hangs is not released, and can be used afterwards.
func TestReleaseWaitsForCalls(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "pcie-quad")
	session, _ := openNode(t, node)
	uuid := node.Machine().GPUs[1].UUID
	testenv.Must(t, node.Hang("nvmlDeviceGetMemoryInfo_v2", 1))
	used := make(chan error)
	go func() {
		_, err := session.Use(t.Context(), uuid)
		used <- err
	}()
	waitUntil(t, "the call hangs", func() bool { return len(InFlight()) > 0 })
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := session.Release(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("released a driver that hangs: %v", err)
	}
	testenv.Must(t, session.Open(t.Context()))
	cleared := make(chan error)
	time.AfterFunc(100*time.Millisecond, func() { cleared <- node.Clear() })
	testenv.Must(t, session.Release(t.Context()))
	testenv.Must(t, <-used)
	testenv.Must(t, <-cleared)
	testenv.Must(t, session.Reopen(t.Context()))
}
