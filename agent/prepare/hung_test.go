package prepare

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/gpu"
)

// containerLimit is how long the preparation of a container may take.
const containerLimit = 25 * time.Second

// hangReset returns a runner on which a reset of the GPU uuid is hanging, for a container or for an administrator.
// The reset ends when the function end is called.
func hangReset(t *testing.T, f *fakeNode, manual bool) (r *Runner, reset *fakeReset, result <-chan error, end func()) {
	t.Helper()
	r = newRunner(t, f)
	reset = &fakeReset{node: f, outcomes: []Outcome{ResetDone}, ends: make(chan struct{})}
	r.opts.Resetter = reset
	hung := make(chan error, 1)
	go func() {
		if manual {
			healthy := func(context.Context, string) error { return nil }
			hung <- r.Reset(within(t, time.Minute), device, healthy)
			return
		}
		_, err := runOne(r, within(t, containerLimit), device, Rules{Policy: Reset})
		hung <- err
	}()
	synctest.Wait()
	end = sync.OnceFunc(func() { close(reset.ends) })
	t.Cleanup(end)
	return r, reset, hung, end
}

// hungError has what the error says when a reset hangs, by whether an administrator requested it (true) or it prepares
// a device for a container. The administrator gets no error while the reset hangs: the request waits for its end.
var hungError = map[bool]string{true: "", false: "the reset that began at "}

// A reset that hangs costs other GPUs no more than its own time limit.
func TestOthersGoOnWhileAResetHangs(t *testing.T) {
	for name, manual := range map[string]bool{"for a container": false, "for an administrator": true} {
		t.Run(name, func(t *testing.T) {
			for _, policy := range Policies() {
				t.Run(string(policy), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						f := &fakeNode{}
						r, reset, hung, end := hangReset(t, f, manual)
						began := time.Now()
						_, err := runOne(r, within(t, containerLimit), devices(1)[0], Rules{Policy: policy})
						took, limit := time.Since(began), hungAfter
						switch policy {
						case Reset:
							checkError(t, err, "GPU-0 is not ready for a container (reset): another GPU is still being reset")
						case None:
							limit = 0
							fallthrough
						default:
							checkError(t, err, "")
						}
						if took > limit {
							t.Errorf("it took %s, want at most %s", took, limit)
						}
						if reset.calls != 1 {
							t.Errorf("%d resets, want 1", reset.calls)
						}
						end()
						checkError(t, <-hung, hungError[manual])
						r.Wait(t.Context())
						synctest.Wait()
					})
				})
			}
		})
	}
}

// A container that already waits for its own reset when another one hangs does not close the driver again.
func TestAWaitingResetIsRefusedAfterOneThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{}
		r := newRunner(t, f)
		reset := &fakeReset{node: f, outcomes: []Outcome{ResetDone}, ends: make(chan struct{})}
		r.opts.Resetter = reset
		var containers sync.WaitGroup
		errs := make(chan string, 2)
		for _, d := range devices(2) { // both are checked before one of them is reset
			containers.Go(func() {
				_, err := runOne(r, within(t, containerLimit), d, Rules{Policy: Reset})
				errs <- err.Error()
			})
		}
		containers.Wait()
		both := <-errs + <-errs
		for _, want := range []string{"the reset that began at 2000-01-01T00:00:00Z", "another GPU is still being reset"} {
			if strings.Count(both, want) != 1 {
				t.Errorf("errors %q, want one with %q", both, want)
			}
		}
		if f.closed != 1 {
			t.Errorf("the driver was closed %d times", f.closed)
		}
		close(reset.ends)
		synctest.Wait()
	})
}

// If a container waits for the driver until its time is over, the error names the reset that keeps the driver closed.
func TestWhoWaitsForTheDriverIsToldWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, hung, end := hangReset(t, &fakeNode{}, false)
		_, err := runOne(r, within(t, time.Second), devices(1)[0], Rules{Policy: Check})
		const why = "(it is closed for a reset of " + uuid + " (0000:17:00.0), since 2000-01-01T00:00:00Z): "
		checkError(t, err, "(wait): wait for the driver "+why)
		end()
		checkError(t, <-hung, hungError[false])
		synctest.Wait()
	})
}

// device reset waits for a hung reset for longer than a container does. The driver is open meanwhile.
func TestAnAdministratorWaitsForAHungReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{persistent: true}
		r, _, hung, end := hangReset(t, f, true)
		time.AfterFunc(2*hungAfter, end)
		checkError(t, <-hung, "")
		if !f.persistent || f.released {
			t.Errorf("after the reset: persistence mode %t, released %t", f.persistent, f.released)
		}
		// The driver was opened during the reset, and is opened again.
		calls := strings.Join(f.log, ", ")
		for _, want := range []string{"reset, released false, hold ", ", released true, released false, was reset"} {
			if !strings.Contains(calls, want) {
				t.Errorf("calls %s, want %s in them", calls, want)
			}
		}
		_, err := runOne(r, within(t, time.Second), device, Rules{Policy: Check})
		checkError(t, err, "")
	})
}

// A reset that waits for a call which hangs on another GPU does not keep the others waiting.
func TestAResetDoesNotWaitLongForACallThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{hang: make(chan struct{})}
		r := newRunner(t, f)
		r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetDone}}
		all := devices(2)
		var containers sync.WaitGroup
		containers.Go(func() { _, _ = runOne(r, within(t, time.Minute), device, Rules{Policy: Check}) })
		synctest.Wait()
		containers.Go(func() {
			_, err := runOne(r, within(t, containerLimit), all[0], Rules{Policy: Reset})
			checkError(t, err, "(reset): wait for the driver (other devices are being prepared)")
		})
		synctest.Wait()
		began := time.Now()
		_, err := runOne(r, within(t, containerLimit), all[1], Rules{Policy: Check})
		checkError(t, err, "")
		if took := time.Since(began); took > waitLimit {
			t.Errorf("it took %s", took)
		}
		close(f.hang)
		containers.Wait()
	})
}

// A program that is about to restart begins no reset, and does not restart while the driver is closed.
func TestKeepOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{use: gpu.Use{}}
		r, reset, hung, end := hangReset(t, f, false)
		opened := r.KeepOpen()
		began := time.Now()
		<-opened
		if took := time.Since(began); took > hungAfter {
			t.Errorf("the driver is open after %s", took)
		}
		checkError(t, <-hung, hungError[false])
		end()
		synctest.Wait()
		if opened := r.KeepOpen(); opened != nil {
			t.Error("the driver is not open")
		}
		_, err := runOne(r, t.Context(), devices(1)[0], Rules{Policy: Reset})
		checkError(t, err, "(reset): the driver cannot be closed now, since this program is restarting")
		_, err = runOne(r, t.Context(), devices(1)[0], Rules{Policy: Clean})
		checkError(t, err, "")
		err = r.WithoutDriver(t.Context(), "it is released", func() bool { return true })
		checkError(t, err, "since this program is restarting")
		if reset.calls != 1 {
			t.Errorf("%d resets, want 1", reset.calls)
		}
	})
}
