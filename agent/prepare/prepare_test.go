package prepare

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func TestPolicies(t *testing.T) {
	checked := []string{"sharing ok", "health ok", "processes ok", "memory ok"}
	shared := []string{"sharing ok", "health ok", "processes skipped", "memory skipped"}
	mig := device
	mig.UUID, mig.SharesMemory = "MIG-7f8c", true
	for name, c := range map[string]struct {
		node   *fakeNode
		device Device
		rules  Rules
		want   []string
		err    string // a part of it
		calls  []string
	}{
		"none does nothing, not even with a lost GPU": {
			node: &fakeNode{healthErr: errors.New("lost")}, rules: Rules{Policy: None},
		},
		"check passes on an idle GPU": {rules: Rules{Policy: Check}, want: checked},
		"check refuses a GPU that is not healthy, with the reason": {
			node:  &fakeNode{healthErr: errors.New("XID 79 (fallen off the bus)")},
			rules: Rules{Policy: Check},
			want:  []string{"sharing ok", "health failed"},
			err:   uuid + " is not ready for a container (health): XID 79 (fallen off the bus)",
		},
		"check refuses a GPU whose use cannot be read": {
			node:  &fakeNode{useErr: errors.New("nvmlDeviceGetHandleByUUID:\nGPU is lost\x1b[31m")},
			rules: Rules{Policy: Check},
			want:  []string{"sharing ok", "health ok", "processes failed"},
			err:   "(processes): nvmlDeviceGetHandleByUUID: GPU is lost",
		},
		"check tolerates some memory": {
			node:  &fakeNode{use: gpu.Use{MemoryUsed: 256 << 20}},
			rules: Rules{Policy: Check, MemoryTolerance: DefaultMemoryTolerance}, want: checked,
		},
		"check refuses more memory": {
			node:  &fakeNode{use: gpu.Use{MemoryUsed: 257 << 20}},
			rules: Rules{Policy: Check, MemoryTolerance: DefaultMemoryTolerance},
			want:  []string{"sharing ok", "health ok", "processes ok", "memory failed"},
			err:   "(memory): 257 MiB are in use without a process, more than 256 MiB: reset the GPU",
		},
		"check asks of a shared device only whether it is healthy": {
			node: &fakeNode{
				shared: "it has 4 replicas", use: gpu.Use{MemoryUsed: 40 << 30, Processes: []gpu.Process{{PID: 1}}},
			},
			rules: Rules{Policy: Check}, want: shared,
		},
		"check refuses a shared device that is not healthy": {
			node: &fakeNode{shared: "it has 4 replicas", healthErr: errors.New("lost")}, rules: Rules{Policy: Check},
			want: []string{"sharing ok", "health failed"}, err: "(health): lost",
		},
		"check of a MIG device leaves out memory that is not its own": {
			device: mig, node: &fakeNode{use: gpu.Use{MemoryUsed: 40 << 30}}, rules: Rules{Policy: Check},
			want: []string{"sharing ok", "health ok", "processes ok", "memory skipped"},
		},
		"check skips what the driver does not report": {
			node: &fakeNode{use: gpu.Use{ProcessesUnknown: true, MemoryUnknown: true}}, rules: Rules{Policy: Check},
			want: []string{"sharing ok", "health ok", "processes skipped", "memory skipped"},
		},
		"check refuses a process where the driver reports some": {
			node:  &fakeNode{use: gpu.Use{ProcessesUnknown: true, Processes: []gpu.Process{{Graphics: true}}}},
			rules: Rules{Policy: Check}, want: []string{"sharing ok", "health ok", "processes failed"},
			err: "(processes): process 0 (not in /proc) still uses it",
		},
		"clean restores the settings": {
			node:  &fakeNode{changed: []string{"compute mode PROHIBITED instead of DEFAULT"}},
			rules: Rules{Policy: Clean},
			want:  append(checked[:4:4], "settings ok"), calls: []string{"restore exclusive=false"},
		},
		"clean refuses a GPU that does not take its settings": {
			node: &fakeNode{changeErr: errors.New("no permission")}, rules: Rules{Policy: Clean},
			want: append(checked[:4:4], "settings failed"), err: "(settings): no permission",
			calls: []string{"restore exclusive=false"},
		},
		"clean leaves the settings of a shared GPU": {
			node: &fakeNode{shared: "MPS"}, rules: Rules{Policy: Clean}, want: append(shared[:4:4], "settings skipped"),
		},
		"clean leaves the settings of a GPU to which a MIG device belongs": {
			device: mig, rules: Rules{Policy: Clean},
			want: []string{"sharing ok", "health ok", "processes ok", "memory skipped", "settings skipped"},
		},
		"reset never resets a shared GPU": {
			node: &fakeNode{shared: "MPS"}, rules: Rules{Policy: Reset},
			want: append(shared[:4:4], "settings skipped", "reset skipped"),
		},
		"strict reset refuses a shared GPU": {
			node: &fakeNode{shared: "MPS"}, rules: Rules{Policy: Reset, Strict: true},
			want: append(shared[:4:4], "settings skipped", "reset failed"),
			err:  "(reset): the GPU must be reset and cannot be: the device is shared: MPS",
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := c.device
			if d.UUID == "" {
				d = device
			}
			if c.node == nil {
				c.node = &fakeNode{}
			}
			rec, err := runOne(newRunner(t, c.node), t.Context(), d, c.rules)
			checkError(t, err, c.err)
			if diff := cmp.Diff(c.want, results(rec)); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.calls, c.node.log); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
			failed, isError := errors.AsType[*Error](err)
			if err != nil && (!isError || failed.UUID != d.UUID || rec.Error != err.Error()) {
				t.Errorf("the error is %#v, the record's %q", err, rec.Error)
			}
		})
	}
}

// A driver that hangs for a device costs its container, and others nothing.
func TestDriverHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{hang: make(chan struct{})}
		r := newRunner(t, f)
		began := time.Now()
		other := devices(1)[0]
		records, err := r.Run(within(t, time.Second), []Device{other, device}, Rules{Policy: Reset})
		const late = " is not ready for a container (processes): the step has not returned in time: context deadline exceeded"
		if want := uuid + late; err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
		if took := time.Since(began); took != time.Second+abandonAfter {
			t.Errorf("it took %s", took)
		}
		if diff := cmp.Diff([]string{"sharing ok", "health ok", "processes failed"}, results(records[0])); diff != "" {
			t.Errorf("steps (-want +got):\n%s", diff)
		}
		_, err = runOne(r, within(t, time.Second), device, Rules{Policy: Check})
		checkError(t, err, "(wait): an earlier preparation of the device has not ended")
		_, err = runOne(r, within(t, time.Second), other, Rules{Policy: Check})
		checkError(t, err, "")
		close(f.hang)
		_, err = runOne(r, within(t, time.Second), device, Rules{Policy: Check})
		checkError(t, err, "")
		if len(f.log) > 0 {
			t.Errorf("after the deadline the abandoned run went on: %v", f.log)
		}
	})
}

func TestOnlyTheHostsNamespaceShowsProcesses(t *testing.T) {
	f := &fakeNode{use: gpu.Use{Processes: []gpu.Process{{PID: 1}}, MemoryUsed: 1 << 30}}
	r := newRunner(t, f)
	r.opts.Host = fakeProc(t)
	for policy, c := range map[Policy]struct{ memory, err string }{
		Check: {"memory skipped", ""}, // it may be a desktop's
		Clean: {"memory failed", "(memory): 1024 MiB are in use without a process"},
	} {
		rec, err := runOne(r, t.Context(), device, Rules{Policy: policy})
		checkError(t, err, c.err)
		want := []string{"sharing ok", "health ok", "processes skipped", c.memory}
		if diff := cmp.Diff(want, results(rec)); diff != "" {
			t.Errorf("%s: steps (-want +got):\n%s", policy, diff)
		}
	}
}

// A step that was due and could not be run is recorded differently from a step that does not concern the device.
func TestUndoneSteps(t *testing.T) {
	part := device
	part.UUID, part.SharesMemory = "MIG-7f8c", true
	for name, c := range map[string]struct {
		node   *fakeNode
		device Device
		policy Policy
		want   []string
	}{
		"all steps were done": {node: &fakeNode{}, device: device, policy: Check},
		"the driver does not report the use": {
			node: &fakeNode{use: gpu.Use{ProcessesUnknown: true, MemoryUnknown: true}}, device: device, policy: Check,
			want: []string{
				"processes (the driver does not report the processes on the device)",
				"memory (the driver does not report the memory in use)",
			},
		},
		"the GPU cannot be reset": {
			node: &fakeNode{}, device: device, policy: Reset, want: []string{"reset (not reset: Not Supported)"},
		},
		"a shared device":  {node: &fakeNode{shared: "MPS"}, device: device, policy: Reset},
		"a part of a GPU":  {node: &fakeNode{}, device: part, policy: Reset},
		"a refused device": {node: &fakeNode{healthErr: errors.New("lost")}, device: device, policy: Check},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRunner(t, c.node)
			r.opts.Resetter = &fakeReset{node: c.node, outcomes: []Outcome{ResetNotSupported}}
			rec, _ := runOne(r, t.Context(), c.device, Rules{Policy: c.policy})
			if diff := cmp.Diff(c.want, rec.Undone()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"a\nb\x00c\x1b[1m": "a b c [1m",
		"\xffx":            "?x",
	} {
		if got := plain(in); got != want {
			t.Errorf("%.20q: got %.40q", in, got)
		}
	}
}

// devices are several whole GPUs.
func devices(n int) []Device {
	var list []Device
	for i := range n {
		name := fmt.Sprintf("GPU-%d", i)
		list = append(list, Device{UUID: name, GPU: name})
	}
	return list
}

// The GPUs of a container are reset together, and the driver is closed once for them. Another container waits.
func TestResetOfSeveralGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{}
		r := newRunner(t, f)
		r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetDone}, takes: time.Second}
		all := devices(4)
		var containers sync.WaitGroup
		for _, gpus := range [][]Device{all[:3], all[3:]} {
			containers.Go(func() {
				records, err := r.Run(t.Context(), gpus, Rules{Policy: Reset})
				checkError(t, err, "")
				if len(records) != len(gpus) {
					t.Errorf("%d records of %d devices", len(records), len(gpus))
				}
			})
		}
		containers.Wait()
		var driver []string
		resets := 0
		for _, call := range f.log {
			switch call {
			case "was reset":
				resets++
			case "released true", "reset", "released false":
				driver = append(driver, call)
			}
		}
		once := []string{"released true", "reset", "released false"}
		if diff := cmp.Diff(slices.Repeat(once, 2), driver); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
		if resets != len(all) {
			t.Errorf("%d GPUs were reset", resets)
		}
	})
}

// One device that fails refuses the container, and nothing is changed. All devices that fail are named.
func TestADeviceOfSeveralFails(t *testing.T) {
	f := &fakeNode{unhealthy: map[string]error{"GPU-1": errors.New("XID 79"), "GPU-3": errors.New("lost")}}
	r := newRunner(t, f)
	r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetDone}}
	records, err := r.Run(t.Context(), devices(4), Rules{Policy: Reset})
	const why = " is not ready for a container (health): "
	checkError(t, err, "GPU-1"+why+"XID 79; GPU-3"+why+"lost")
	if len(records) != 2 || records[0].UUID != "GPU-1" || records[1].UUID != "GPU-3" {
		t.Errorf("records %+v, want those of the devices that failed", records)
	}
	if len(f.log) > 0 {
		t.Errorf("the devices were changed: %v", f.log)
	}
	f.unhealthy = nil
	_, err = r.Run(within(t, plenty), devices(4), Rules{Policy: Reset})
	checkError(t, err, "")
}

// While a device is waited for, others can be reset. The driver is not called meanwhile.
func TestWaitingForADeviceLetsOthersBeReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{use: gpu.Use{MemoryUsed: 1 << 30}}
		r := newRunner(t, f)
		r.opts.AwaitUnused = 5 * time.Second
		refused := make(chan time.Time)
		go func() {
			_, err := runOne(r, t.Context(), device, Rules{Policy: Clean})
			checkError(t, err, "(memory): 1024 MiB are in use")
			refused <- time.Now()
		}()
		synctest.Wait()
		began := time.Now()
		err := r.WithoutDriver(t.Context(), "it is released", func() bool { time.Sleep(time.Second); return true })
		checkError(t, err, "")
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the driver was released after %s", took)
		}
		if took := (<-refused).Sub(began); took < 4*time.Second || took > 6*time.Second {
			t.Errorf("refused after %s", took)
		}
		go func() {
			_, err := runOne(r, within(t, time.Second), device, Rules{Policy: Clean})
			checkError(t, err, "(memory): 1024 MiB are in use")
			refused <- time.Now()
		}()
		synctest.Wait()
		err = r.WithoutDriver(t.Context(), "it is released", func() bool { <-refused; return true })
		checkError(t, err, "")
	})
}
