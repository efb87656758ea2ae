package nvml

import (
	"os"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestCloseIdle(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, _ := newTestSession(t, "pcie-quad")
	if session.CloseIdle(t.Context()) {
		t.Error("the library is closed, and was never open")
	}
	before := takeSnapshot(t, session)
	for i := range before.Devices { // the simulated GPUs are as after boot with the persistence daemon
		testenv.Must(t, node.Set(i, map[string]string{"persistence-mode": "0"}))
	}
	uuid := before.Devices[2].UUID
	for why, c := range map[string]struct{ begin, end func() error }{
		"a process uses a GPU": {
			func() error { return node.AddProcess(2, sim.Process{PID: os.Getpid(), Type: sim.ComputeProcess}) },
			func() error { return node.RemoveProcess(2, os.Getpid()) },
		},
		"a GPU is in persistence mode": {
			func() error { _, err := session.SetPersistence(t.Context(), uuid, true); return err },
			func() error { _, err := session.SetPersistence(t.Context(), uuid, false); return err },
		},
		"the processes are unknown": {
			func() error { return node.Fail(computeProcesses, 2, int(nvml.ERROR_NOT_SUPPORTED)) },
			func() error { return node.Fail(computeProcesses, 2, int(nvml.SUCCESS)) },
		},
		"the driver does not answer": {
			func() error { return node.Fail(computeProcesses, 2, int(nvml.ERROR_UNKNOWN)) },
			func() error { return node.Fail(computeProcesses, 2, int(nvml.SUCCESS)) },
		},
	} {
		testenv.Must(t, c.begin())
		if session.CloseIdle(t.Context()) || session.library == nil {
			t.Errorf("the library is closed although %s", why)
		}
		testenv.Must(t, c.end())
	}
	if !session.CloseIdle(t.Context()) || session.library != nil {
		t.Error("the library is open")
	}
	compareToNode(t, node, takeSnapshot(t, session))
	if session.library == nil {
		t.Error("the library is closed after a snapshot")
	}
}
