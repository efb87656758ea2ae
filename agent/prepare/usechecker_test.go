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

// fakeMarks has the devices that are marked as in use, and those that containers have.
type fakeMarks struct {
	mu      sync.Mutex
	marks   map[string]string
	held    map[string]bool
	heldErr error
}

func (f *fakeMarks) SetInUse(uuid, reason string, _ []int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.marks[uuid] = reason; reason == "" {
		delete(f.marks, uuid)
	}
}

func (f *fakeMarks) InUse(uuid string) bool {
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

// useFixture is a UseChecker that runs in a bubble of synctest, with three devices. All of them are in use as the node
// says, and nothing is checked on the last one.
type useFixture struct {
	*fakeMarks
	*testing.T

	node *fakeNode
}

const (
	secondGPU, uncheckedGPU = "GPU-2", "GPU-unchecked"
	whyUsed                 = "1024 MiB are in use without a process, more than 0 MiB: reset the GPU"
)

// inBubble calls a function with a UseChecker that runs. Each round is over when the function goes on.
func inBubble(t *testing.T, do func(*useFixture)) {
	t.Helper()
	marks := &fakeMarks{marks: map[string]string{uncheckedGPU: "of before a reload"}}
	f := &useFixture{fakeMarks: marks, node: &fakeNode{}}
	runner := newRunner(t, f.node)
	synctest.Test(t, func(t *testing.T) {
		f.T = t
		device := func(uuid string, p Policy) CheckedDevice {
			return CheckedDevice{Device{UUID: uuid, GPU: uuid}, Rules{Policy: p}}
		}
		checker := NewUseChecker(UseCheckerOptions{
			Runner: runner, State: f, Log: slog.New(slog.DiscardHandler),
			Offered: func() map[string]CheckedDevice {
				return map[string]CheckedDevice{
					uuid: device(uuid, Clean), secondGPU: device(secondGPU, Clean), uncheckedGPU: device(uncheckedGPU, None),
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
		go func() { ended <- checker.Run(ctx) }()
		time.Sleep(time.Millisecond)
		do(f)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// round waits for a round, and checks which devices are marked afterwards.
func (f *useFixture) round(act string, want ...string) {
	f.Helper()
	time.Sleep(useInterval)
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	marks := map[string]string{}
	for _, uuid := range want {
		marks[uuid] = whyUsed
	}
	if diff := cmp.Diff(marks, f.marks); diff != "" {
		f.Errorf("%s: marked (-want +got):\n%s", act, diff)
	}
}

func (f *useFixture) use(bytes uint64) { f.node.set(gpu.Use{MemoryUsed: bytes}) }

func TestTheUseOfDevicesThatNoContainerHolds(t *testing.T) {
	inBubble(t, func(f *useFixture) {
		f.use(1 << 30)
		f.hold(nil, uuid)
		f.round("it was found in use once")
		f.round("it was found in use twice, and a container holds the other", secondGPU)
		f.hold(nil, secondGPU)
		f.round("the container has the other one now, and this one was found once")
		f.hold(errors.New("the kubelet does not answer"))
		f.round("it is unknown what containers have")
		f.hold(nil, secondGPU)
		f.round("it was found, but not in the round before")
		f.round("it was found again", uuid)
		f.use(0)
		f.hold(errors.New("the kubelet does not answer"))
		f.round("it is unknown what containers have", uuid)
		f.hold(nil, secondGPU)
		f.round("it is no longer in use")
		f.use(1 << 30)
		f.round("it is in use again, and was found once")
		f.use(0)
		f.round("it is no longer in use")
		f.use(1 << 30)
		f.round("it is in use for a third time, and was found once")
		f.node.failUse(errors.New("no answer"))
		f.round("the driver does not answer")
		f.node.failUse(nil)
		f.round("it was found, but not in the round before")
		f.round("it was found twice in a row", uuid)
		f.hold(nil, uuid, secondGPU)
		f.round("a container has it")
		f.SetInUse(uuid, "before a restart", nil)
		f.hold(nil, secondGPU)
		f.round("it was marked before a restart", uuid)
	})
}

// A kubelet that has just started does not know its pods. Their devices are in use, and are not marked.
func TestAKubeletThatMayNotKnowItsPods(t *testing.T) {
	rounds := func(f *useFixture, act string, from time.Time, want ...string) {
		f.Helper()
		for time.Since(from) < kubeletStart {
			f.round(act, want...)
		}
	}
	inBubble(t, func(f *useFixture) {
		f.use(1 << 30)
		rounds(f, "this program has just started", time.Now())
		f.round("they were found twice", uuid, secondGPU)
		f.hold(nil, uuid)
		f.round("a container has one of them", secondGPU)
		f.hold(nil)
		rounds(f, "the kubelet starts and does not know its pod", time.Now(), secondGPU)
		f.use(0)
		f.round("nothing is in use any more")
	})
	inBubble(t, func(f *useFixture) {
		f.use(1 << 30)
		f.hold(nil, uuid)
		f.SetInUse(secondGPU, whyUsed, nil)
		f.round("one was marked before a restart", secondGPU)
		f.hold(nil)
		f.use(0)
		f.round("the kubelet starts, and the marked one is no longer in use")
	})
}
