package prepare

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func TestResetForAnAdministrator(t *testing.T) {
	done := []string{"released true", "reset", "released false", "was reset"}
	for name, c := range map[string]struct {
		outcomes   []Outcome
		persistent bool
		healthy    error
		err        string
		calls      []string
	}{
		"it works, also with a GPU that is not healthy": {outcomes: []Outcome{ResetDone}, calls: done},
		"persistence mode is off meanwhile": {
			outcomes: []Outcome{ResetDone}, persistent: true,
			calls: append(append([]string{"persistence false"}, done...), "persistence true"),
		},
		"the GPU does not recover": {
			outcomes: []Outcome{ResetDone}, healthy: errors.New("it is lost"),
			err: "reset " + uuid + ": after the reset: it is lost", calls: done,
		},
		"not supported": {
			outcomes: []Outcome{ResetNotSupported},
			err:      "reset " + uuid + ": the GPU must be reset and cannot be: Not Supported", calls: done[:3],
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeNode{persistent: c.persistent, healthErr: errors.New("XID 95")}
				r := newRunner(t, f)
				r.opts.Resetter = &fakeReset{node: f, outcomes: c.outcomes}
				err := r.Reset(within(t, time.Second), device, func(context.Context, string) error { return c.healthy })
				checkError(t, err, c.err)
				if diff := cmp.Diff(c.calls, f.log); diff != "" {
					t.Errorf("calls (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// What was tried for a container does not keep an administrator from trying.
func TestAnAdministratorTriesAgain(t *testing.T) {
	f := &fakeNode{}
	r := newRunner(t, f)
	r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetRefused, ResetDone}}
	if _, err := runOne(r, within(t, plenty), device, Rules{Policy: Reset}); err != nil {
		t.Fatal(err)
	}
	err := r.Reset(within(t, plenty), device, func(context.Context, string) error { return nil })
	checkError(t, err, "")
}

func TestUsers(t *testing.T) {
	inContainer := start(t, makeCgroup(t, containerName("c")), nil, "sleep", "1000").Process.Pid
	other := start(t, "", nil, "sleep", "1000").Process.Pid
	known := start(t, "", nil, copyProgram(t, "agent"), "1000").Process.Pid
	const gone = 1 << 29
	f := &fakeNode{use: gpu.Use{Processes: []gpu.Process{{PID: inContainer}, {PID: other}, {PID: known}, {PID: gone}}}}
	r := newRunner(t, f)
	containers, others, err := r.Users(t.Context(), uuid, []string{"agent"})
	if err != nil || len(containers) != 2 || len(others) != 1 ||
		!strings.HasPrefix(containers[0], fmt.Sprintf("process %d (not in ", gone)) ||
		!strings.HasPrefix(containers[1], fmt.Sprintf("process %d (sleep, UID 0, cgroup ", inContainer)) ||
		!strings.HasPrefix(others[0], fmt.Sprintf("process %d (sleep, user root, cgroup ", other)) {
		t.Errorf("containers %q, others %q, error %v", containers, others, err)
	}
	f.set(gpu.Use{ProcessesUnknown: true})
	if containers, others, err := r.Users(t.Context(), uuid, nil); err != nil || len(containers)+len(others) > 0 {
		t.Errorf("where processes are not reported: containers %q, others %q, error %v", containers, others, err)
	}
	f.useErr = fmt.Errorf("read what uses it: %w", gpu.ErrResetRequired)
	if _, _, err := r.Users(t.Context(), uuid, nil); err != nil {
		t.Errorf("before a reset that the driver requires: %v", err)
	}
	f.useErr = errors.New("GPU is lost")
	if _, _, err := r.Users(t.Context(), uuid, nil); err == nil {
		t.Error("the driver's error is lost")
	}
}

func TestWithoutDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{}
		r := newRunner(t, f)
		err := r.WithoutDriver(t.Context(), "it is released", func() bool {
			_, err := runOne(r, within(t, time.Second), device, Rules{Policy: Check})
			checkError(t, err, "wait for the driver (it is released")
			return true
		})
		checkError(t, err, "")
		if _, err := runOne(r, within(t, time.Second), device, Rules{Policy: Check}); err != nil {
			t.Error(err)
		}
		checkError(t, r.WithoutDriver(t.Context(), "it is released", func() bool { return false }), "")
		if diff := cmp.Diff([]string{"released true", "released false", "released true"}, f.log); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
	})
}
