package sim

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestSet checks the state, without its events, after values were set.
func TestSet(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{PlainNodes: true})
	for name, c := range map[string]struct {
		values map[string]string
		want   map[string]uint64
		events []EventType
	}{
		"a name": {
			map[string]string{"recovery-action": "reboot"},
			map[string]uint64{"recovery-action": 2},
			[]EventType{EventRecoveryAction},
		},
		"an unknown action": {
			map[string]string{"recovery-action": "99"},
			map[string]uint64{"recovery-action": 99},
			[]EventType{EventRecoveryAction},
		},
		"no action": {map[string]string{"recovery-action": "none"}, map[string]uint64{"recovery-action": 0}, nil},
		"ECC errors": {
			map[string]string{"ecc-corrected": "3", "ecc-uncorrected": "1", "ecc-corrected-aggregate": "9"},
			map[string]uint64{"ecc-corrected": 3, "ecc-uncorrected": 1, "ecc-corrected-aggregate": 9},
			[]EventType{EventSingleBitECC, EventDoubleBitECC},
		},
		"ports":              {map[string]string{"links-down": "0,3"}, map[string]uint64{"links-down": 9}, nil},
		"all ports":          {map[string]string{"links-down": "all"}, map[string]uint64{"links-down": 1<<18 - 1}, nil},
		"an amount":          {map[string]string{"memory-used": "2GiB"}, map[string]uint64{"memory-used": 2 << 30}, nil},
		"the fabric's state": {map[string]string{"fabric-state": "not-started"}, map[string]uint64{"fabric-state": 1}, nil},
		"a compute mode":     {map[string]string{"compute-mode": "prohibited"}, map[string]uint64{"compute-mode": 2}, nil},
		"the default":        {map[string]string{"temperature": Default}, map[string]uint64{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if err := first(n.Clear(), n.Set(3, map[string]string{"temperature": Default}), n.Set(3, c.values)); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, must(n.Values(3))); diff != "" {
				t.Errorf("values (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.events, eventTypes(t, n)); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
			if err := first(n.Clear(), n.SetSilently(3, c.values)); err != nil {
				t.Fatal(err)
			}
			if got := eventTypes(t, n); len(got) > 0 {
				t.Errorf("events %v without --no-events", got)
			}
			if err := n.ClearGPU(3); err != nil || state(t, n) != "" {
				t.Errorf("after ClearGPU the state is %q, error %v", state(t, n), err)
			}
		})
	}
}

// eventTypes returns the types of the events in the state.
func eventTypes(t *testing.T, n *Node) (types []EventType) {
	t.Helper()
	for _, r := range must(n.readState()) {
		if r.name == "event" {
			types = append(types, EventType(must(r.number("type"))))
		}
	}
	return types
}

func TestInvalidValuesChangeNothing(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{PlainNodes: true})
	volta := makeNode(t, "dgx1-v100", Options{PlainNodes: true})
	desk := makeNode(t, "workstation", Options{PlainNodes: true})
	for name, err := range map[string]error{
		"a GPU behind the last":       n.Set(8, map[string]string{"temperature": "1"}),
		"an unknown name":             n.Set(0, map[string]string{"temperatur": "1"}),
		"a name beside a right one":   n.Set(0, map[string]string{"temperature": "1", "x": "1"}),
		"how resets end":              n.Set(0, map[string]string{"reset-result": "1"}),
		"no number":                   n.Set(0, map[string]string{"temperature": "hot"}),
		"a number out of range":       n.Set(0, map[string]string{"remap-pending": "2"}),
		"more memory than there is":   n.Set(0, map[string]string{"memory-used": "1000GiB"}),
		"an amount without a unit":    n.Set(0, map[string]string{"memory-used": "1TB"}),
		"a port that is not":          n.Set(0, map[string]string{"links-down": "18"}),
		"retired pages of Hopper":     n.Set(0, map[string]string{"retired-single-bit": "1"}),
		"remapped rows of Volta":      volta.Set(0, map[string]string{"remap-pending": "1"}),
		"a fabric of Volta":           volta.Set(0, map[string]string{"fabric-state": "completed"}),
		"ECC of a consumer card":      desk.Set(0, map[string]string{"ecc-corrected": "1"}),
		"NVLinks of a consumer card":  desk.Set(0, map[string]string{"links-down": "all"}),
		"a process that is not":       n.AddProcess(0, Process{PID: 1 << 22, Type: ComputeProcess}),
		"a process of no type":        n.AddProcess(0, Process{PID: os.Getpid()}),
		"a process with much memory":  n.AddProcess(0, Process{os.Getpid(), ComputeProcess, 1 << 40, nil}),
		"a process on no MIG device":  n.AddProcess(0, Process{os.Getpid(), ComputeProcess, 1, &Instance{1, 0}}),
		"a process that is not there": n.RemoveProcess(0, os.Getpid()),
	} {
		if !isInvalid(err) {
			t.Errorf("%s: the error is %v, want an InvalidError", name, err)
		}
	}
	if got := state(t, n) + state(t, volta) + state(t, desk); got != "" {
		t.Errorf("invalid values changed the state to %q", got)
	}
}

// TestValuesHaveOneList checks that every definition in the library's header was read.
func TestValuesHaveOneList(t *testing.T) {
	text := must(librarySources.ReadFile("lib/values.h"))
	want := strings.Count(string(text), "\nVALUE(")
	if got := len(allValues()); got != want || got > 64 {
		t.Errorf("%d values read of %d; the library has room for 64", got, want)
	}
}

func TestProcessesInTheStateFile(t *testing.T) {
	n := makeNode(t, "mig-h100", Options{PlainNodes: true})
	cmd := exec.Command("sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	pid := cmd.Process.Pid
	start := must(startTime(pid))
	line := func(kind, rest string) string {
		return fmt.Sprintf("%s gpu=0 pid=%d start=%d %s\n", kind, pid, start, rest)
	}
	p := Process{pid, ComputeProcess, 1 << 20, &Instance{2, 0}}
	if err := n.AddProcess(0, p); err != nil {
		t.Fatal(err)
	}
	if got, want := state(t, n), line("process", "type=compute memory=1048576 gi=2 ci=0"); got != want {
		t.Errorf("state is %q, want %q", got, want)
	}
	p = Process{pid, MPSProcess, 5, nil}
	if err := first(n.Set(0, map[string]string{"accounting-mode": "1"}), n.AddProcess(0, p),
		n.RemoveProcess(0, pid)); err != nil {
		t.Fatal(err)
	}
	want := "set gpu=0 accounting-mode=1\n" + line("account", "type=mps memory=5")
	if got := state(t, n); got != want {
		t.Errorf("state is %q, want %q", got, want)
	}
}
