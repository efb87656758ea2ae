package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// simulated is a simulated driver with the session that reads it.
type simulated struct {
	*nvml.Session
	node *sim.Node
	gpus *gpu.Snapshot

	mu     sync.Mutex
	reset  []string // the UUIDs of GPUs that were reset
	cannot string   // be reset, and why; one GPU at a time
}

var _ prepare.Driver = (*nvml.Session)(nil)

func (s *simulated) Shared(string) string { return "" }

func (s *simulated) WasReset(uuid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reset = append(s.reset, uuid)
}

func (s *simulated) HoldForReset(uuid, why string) { panic(uuid + " is " + why) }

func (s *simulated) EndHold(string) {}

func (s *simulated) CannotReset(string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cannot
}

func (s *simulated) SetCannotReset(_, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cannot = why
}

func (s *simulated) Healthy(ctx context.Context, uuid string) error {
	probes, err := s.Probes(ctx)
	if err != nil {
		return err
	}
	for _, p := range probes {
		switch {
		case p.UUID != uuid:
		case p.Error != "":
			return errors.New(p.Error)
		case p.RecoveryAction > 0:
			return fmt.Errorf("recovery action %d", p.RecoveryAction)
		}
	}
	return nil
}

func (s *simulated) device(i int) prepare.Device {
	d := &s.gpus.Devices[i]
	return prepare.Device{
		UUID: d.UUID, GPU: d.UUID, PCIBusID: d.PCIBusID,
		Nodes: []string{filepath.Join(s.node.Root(), "dev", fmt.Sprintf("nvidia%d", d.Minor))},
	}
}

// The steps on a simulated driver, with its nvidia-smi. A process can load one NVML library, so there is one node, and
// each case has a GPU of it.
func TestSimulatedDriver(t *testing.T) {
	t.Parallel()
	own, err := host.New("", "", "")
	testenv.Must(t, err)
	if link, err := os.Readlink("/proc/self/ns/pid"); err != nil || link != "pid:[4026531836]" {
		testenv.Skip(t, "needs the host's PID namespace")
	}
	node := simtest.Node(t, "dgx-h100", simtest.PlainNodes())
	root, err := host.New(node.Root(), "", "")
	testenv.Must(t, err)
	s := &simulated{Session: nvml.NewSession(nvml.Options{Host: root, Timeout: 20 * time.Second}), node: node}
	t.Cleanup(func() { testenv.Must(t, s.Close()) })
	s.gpus, err = s.Snapshot(t.Context())
	testenv.Must(t, err)
	others := make(chan struct{}) // uses of the driver that know nothing of resets
	t.Cleanup(func() { <-others })
	go func() {
		defer close(others)
		whole := context.WithoutCancel(t.Context()) // the library is not closed while a call is in it
		for t.Context().Err() == nil {
			_, _ = s.Snapshot(whole)
			_, _ = s.Probes(whole)
			time.Sleep(10 * time.Millisecond)
		}
	}()
	runner := prepare.New(prepare.Options{
		Host: own, Driver: s, State: s, AwaitUnused: 300 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
		Resetter: &prepare.DriverReset{
			Host: own, Check: func(string) error { return nil },
			Find: func() (prepare.Program, bool) {
				library, err := filepath.Abs(node.Library())
				testenv.Must(t, err)
				return prepare.Program{
					Path: node.SMI(), Env: []string{"LD_LIBRARY_PATH=" + filepath.Dir(library)},
				}, true
			},
		},
	})
	// The persistence mode of a GPU that was not reset is restored after its run.
	t.Cleanup(func() { runner.Wait(context.WithoutCancel(t.Context())) })
	run := func(t *testing.T, i int, policy prepare.Policy, limit time.Duration) (prepare.Record, error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		rules := prepare.DefaultRules()
		rules.Policy = policy
		records, err := runner.Run(ctx, []prepare.Device{s.device(i)}, rules)
		for _, step := range records[0].Steps {
			t.Logf("%-11s %-7s %8s %s", step.Name, step.Result, step.Duration.Round(time.Microsecond), step.Note)
		}
		return records[0], err
	}
	wantError := func(t *testing.T, err error, text string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v, want %q in it", err, text)
		}
	}
	const long = 25 * time.Second

	t.Run("an idle GPU", func(t *testing.T) {
		rec, err := run(t, 0, prepare.Check, long)
		if err != nil || len(rec.Steps) != 4 {
			t.Errorf("error %v, steps %+v", err, rec.Steps)
		}
	})
	t.Run("a process that is left over", func(t *testing.T) {
		testenv.Must(t, node.AddProcess(1, sim.Process{PID: os.Getpid(), Type: sim.ComputeProcess, MemoryBytes: 1 << 30}))
		_, err := run(t, 1, prepare.Check, long)
		wantError(t, err, fmt.Sprintf("(processes): process %d (prepare.test, user root, cgroup ", os.Getpid()))
		testenv.Must(t, node.ClearGPU(1))
		_, err = run(t, 1, prepare.Check, long)
		testenv.Must(t, err)
	})
	t.Run("the kinds of context", func(t *testing.T) {
		own := sim.Process{PID: os.Getpid(), MemoryBytes: 1 << 30}
		for _, c := range []struct {
			kind sim.ProcessType
			want gpu.Process
		}{
			{sim.ComputeProcess, gpu.Process{Compute: true}},
			{sim.GraphicsProcess, gpu.Process{Graphics: true}},
			{sim.MPSProcess, gpu.Process{MPS: true}},
		} {
			own.Type = c.kind
			testenv.Must(t, node.AddProcess(1, own))
			use, err := s.Use(t.Context(), s.device(1).UUID)
			testenv.Must(t, err)
			c.want.PID, c.want.MemoryBytes = own.PID, own.MemoryBytes
			if diff := cmp.Diff([]gpu.Process{c.want}, use.Processes); diff != "" {
				t.Errorf("%s (-want +got):\n%s", c.kind, diff)
			}
			testenv.Must(t, node.ClearGPU(1))
		}
	})
	t.Run("changed settings", func(t *testing.T) {
		testenv.Must(t, node.SetSilently(2, map[string]string{
			"compute-mode": "prohibited", "power-limit": "200000", "application-clock-graphics": "345",
			"locked-clock-graphics-min": "345", "locked-clock-graphics-max": "345", "locked-clock-memory-max": "2619",
			"ecc-corrected": "3", "ecc-corrected-aggregate": "5",
		}))
		rec, err := run(t, 2, prepare.Clean, long)
		testenv.Must(t, err)
		note := rec.Steps[len(rec.Steps)-1].Note
		for _, want := range []string{"power limit 200 W", "345 MHz", "mode PROHIBITED", "counts 3 (corrected)"} {
			if !strings.Contains(note, want) {
				t.Errorf("%q is not in %q", want, note)
			}
		}
		left, err := node.Values(2)
		testenv.Must(t, err)
		if diff := cmp.Diff(map[string]uint64{"ecc-corrected-aggregate": 5}, left); diff != "" {
			t.Errorf("values that are left (-want +got):\n%s", diff)
		}
	})
	t.Run("a reset, with persistence mode on and memory that no process has", func(t *testing.T) {
		testenv.Must(t, node.Set(3, map[string]string{"memory-used": "1GiB"}))
		testenv.Must(t, node.SetReset(3, sim.ResetFault{Result: sim.ResetBusy, Tries: 2}))
		rec, err := run(t, 3, prepare.Reset, long)
		testenv.Must(t, err)
		if last := rec.Steps[len(rec.Steps)-1]; last.Name != "memory" || last.Result != prepare.OK {
			t.Errorf("the last step is %+v", last)
		}
		left, err := node.Values(3)
		testenv.Must(t, err)
		if len(left) > 0 || !slices.Equal(s.reset, []string{s.device(3).GPU}) {
			t.Errorf("values that are left: %v; GPUs that were reset: %v", left, s.reset)
		}
	})
	t.Run("resets of several GPUs at once", func(t *testing.T) {
		s.reset = nil
		var devices []prepare.Device
		for i := range 4 {
			testenv.Must(t, node.SetReset(i, sim.ResetFault{Result: sim.ResetWorks, Delay: 300 * time.Millisecond}))
			devices = append(devices, s.device(i))
		}
		rules := prepare.DefaultRules()
		rules.Policy = prepare.Reset
		_, err := runner.Run(t.Context(), devices, rules)
		testenv.Must(t, err)
		if len(s.reset) != 4 {
			t.Errorf("GPUs that were reset: %v", s.reset)
		}
	})
	t.Run("another process has the GPU open", func(t *testing.T) {
		f, err := os.Open(s.device(4).Nodes[0])
		testenv.Must(t, err)
		defer f.Close()
		_, err = run(t, 4, prepare.Reset, 3*time.Second)
		wantError(t, err, "(reset): nvidia-smi: GPU ")
		wantError(t, err, "In use by another client; the processes that have it open are unknown: ")
	})
	t.Run("a GPU that cannot be reset", func(t *testing.T) {
		testenv.Must(t, node.SetReset(5, sim.ResetFault{Result: sim.ResetNotSupported}))
		rec, err := run(t, 5, prepare.Reset, long)
		testenv.Must(t, err)
		if last := rec.Steps[len(rec.Steps)-1]; last.Name != "reset" || last.Result != prepare.Skipped {
			t.Errorf("the last step is %+v", last)
		}
	})
	t.Run("a GPU that is lost", func(t *testing.T) {
		testenv.Must(t, node.Lose(7))
		_, err := run(t, 7, prepare.Reset, long)
		wantError(t, err, "(health): ")
	})
}
