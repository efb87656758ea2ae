package prepare

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

// fakeMarks has the devices that are in use after their container, and those that containers have.
type fakeMarks struct {
	mu      sync.Mutex
	marks   map[string]string
	held    map[string]bool
	heldErr error
}

func (f *fakeMarks) SetLeftInUse(uuid, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.marks[uuid] = reason; reason == "" {
		delete(f.marks, uuid)
	}
}

func (f *fakeMarks) LeftInUse(uuid string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.marks[uuid] != ""
}

func (f *fakeMarks) hold(err error, uuids ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held, f.heldErr = map[string]bool{}, err
	for _, uuid := range uuids {
		f.held[uuid] = true
	}
}

func TestFreed(t *testing.T) {
	const other, unchecked = "GPU-never-held", "GPU-unchecked"
	const why = "1024 MiB are in use without a process, more than 0 MiB: reset the GPU"
	inUse := &fakeNode{use: gpu.Use{MemoryUsed: 1 << 30}}
	runner := newRunner(t, inUse)
	synctest.Test(t, func(t *testing.T) {
		f := &fakeMarks{marks: map[string]string{unchecked: "of before a reload"}}
		device := func(uuid string, p Policy) FreedDevice {
			return FreedDevice{Device{UUID: uuid, GPU: uuid}, Rules{Policy: p}}
		}
		freed := NewFreedChecker(FreedOptions{
			Runner: runner, State: f, Log: slog.New(slog.DiscardHandler),
			Offered: func() map[string]FreedDevice {
				return map[string]FreedDevice{
					uuid: device(uuid, Clean), other: device(other, Clean), unchecked: device(unchecked, None),
				}
			},
			Held: func(context.Context) (map[string]bool, error) {
				f.mu.Lock()
				defer f.mu.Unlock()
				return maps.Clone(f.held), f.heldErr
			},
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- freed.Run(ctx) }()
		round := func(act string, want map[string]string) {
			t.Helper()
			time.Sleep(freedInterval)
			synctest.Wait()
			f.mu.Lock()
			defer f.mu.Unlock()
			if diff := cmp.Diff(want, f.marks); diff != "" {
				t.Errorf("%s: marked (-want +got):\n%s", act, diff)
			}
		}
		time.Sleep(time.Millisecond) // each round is over when the test checks it
		none, marked := map[string]string{}, map[string]string{uuid: why}
		f.hold(nil, uuid)
		round("a container has it", none)
		f.hold(nil)
		round("it was found in use once", none)
		round("it was found in use twice", marked)
		round("it stays in use", marked)
		inUse.set(gpu.Use{})
		f.hold(errors.New("the kubelet does not answer"))
		round("it is unknown what containers have", marked)
		f.hold(nil)
		round("it is no longer in use", none)
		inUse.set(gpu.Use{MemoryUsed: 1 << 30})
		round("it was found unused after its container", none)
		round("it was found unused after its container", none)
		f.SetLeftInUse(uuid, "before a restart")
		round("it was marked before a restart", marked)
		f.hold(nil, uuid)
		round("a container has it again", none)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
