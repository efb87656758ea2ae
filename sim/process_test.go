package sim_test

import (
	"os"
	"os/exec"
	"slices"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The driver forgets a process that has ended, also if it was killed and nobody has waited for it yet.
func TestProcessesThatEnd(t *testing.T) {
	t.Parallel()
	node := simtest.Node(t, "dgx-h100", simtest.PlainNodes())
	pids := func(want ...int) {
		t.Helper()
		if got, err := node.PIDs(1); err != nil || !slices.Equal(got, want) {
			t.Errorf("the driver lists %v, %v, want %v", got, err, want)
		}
	}
	add := func(pid int) {
		t.Helper()
		testenv.Must(t, node.AddProcess(1, sim.Process{PID: pid, Type: sim.ComputeProcess, MemoryBytes: 1 << 30}))
	}
	pids()
	add(os.Getpid())
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	testenv.Must(t, cmd.Start())
	add(cmd.Process.Pid)
	pids(os.Getpid(), cmd.Process.Pid)
	testenv.Must(t, cmd.Process.Kill())
	testenv.Eventually(t, "the killed process is a zombie", func() bool {
		got, err := node.PIDs(1)
		return err == nil && len(got) == 1
	})
	_ = cmd.Wait()
	pids(os.Getpid())
	// However many have ended, others can be added.
	for range 300 {
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		testenv.Must(t, cmd.Start())
		add(cmd.Process.Pid)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	pids(os.Getpid())
	testenv.Must(t, node.RemoveProcess(1, os.Getpid()))
	pids()
}
