package nvml

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
)

// These tests run in a bubble of testing/synctest, where the seconds that a driver hangs cost nothing.

func TestGPUThatHangsCostsTheOthersNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		answer := make(chan struct{})
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "late", nvml.SUCCESS }
		h := hostWith(t, nil)

		for range 3 {
			s := snapshotOf(t, l, h)
			if got := s.Devices[2]; got.Error != "does not answer (nvmlDeviceGetName has not returned)" {
				t.Errorf("GPU 2 has the error %q", got.Error)
			}
			if len(s.Links) != 21 {
				t.Errorf("%d links, want the 21 of seven GPUs", len(s.Links))
			}
		}
		synctest.Wait() // for goroutines that are about to end
		if n := taskGoroutines(); n != 1 {
			t.Errorf("after three snapshots %d goroutines are left behind, want 1", n)
		}
		close(answer)
		synctest.Wait()
		if s := snapshotOf(t, l, h); !s.Devices[2].Usable() || s.Devices[2].Name != "late" {
			t.Errorf("after the answer GPU 2 is %+v", s.Devices[2])
		}
	})
}

// taskGoroutines counts the goroutines that call the driver.
func taskGoroutines() int {
	stacks := make([]byte, 1<<20)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "nvml.(*tasks).do.func1(")
}

func TestGPUThatHangsKeepsWhatItSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		answer := make(chan struct{})
		d := device(server, 2)
		d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { <-answer; return nvml.Memory{}, nvml.SUCCESS }
		got := snapshotOf(t, l, hostWith(t, nil)).Devices[2]
		if got.UUID != d.UUID || got.PCIBusID != "0000:12:00.0" || got.Minor != 2 || got.Name == "" || got.MemoryBytes != 0 {
			t.Errorf("got %+v, want all that comes before the memory", got)
		}
		close(answer)
	})
}

// A port that hangs keeps the links from being known, and nothing else: who does not ask for them does not wait.
func TestLinksThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		answer, h := make(chan struct{}), hostWith(t, nil)
		ports := 0
		device(server, 2).GetNvLinkStateFunc = func(port int) (nvml.EnableState, nvml.Return) {
			if ports++; ports == 1 {
				<-answer
			}
			return nvml.FEATURE_DISABLED, nvml.SUCCESS
		}
		var reading sync.WaitGroup
		for range 3 {
			reading.Go(func() {
				if got := snapshotOf(t, l, h); got.Devices[2].Usable() || len(got.Links) != 21 {
					t.Errorf("GPU 2 has the error %q, and there are %d links", got.Devices[2].Error, len(got.Links))
				}
			})
			synctest.Wait()
			begin := time.Now()
			got, err := l.Devices(t.Context(), h)
			if took := time.Since(begin); err != nil || !got.Devices[2].Usable() || took > 0 {
				t.Errorf("a look took %v: %v; GPU 2 is %+v", took, err, got.Devices[2])
			}
			reading.Wait()
		}
		synctest.Wait()
		if n := taskGoroutines(); n != 1 {
			t.Errorf("after three readings %d goroutines are left behind, want 1", n)
		}
		close(answer)
		synctest.Wait()
		if s := snapshotOf(t, l, h); !s.Devices[2].Usable() {
			t.Errorf("after the answer GPU 2 has the error %q", s.Devices[2].Error)
		}
	})
}

// What was given up may still be in a call that does not hang. Then the driver is shut down when that has ended.
func TestCloseAfterALookThatWasGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { time.Sleep(settling / 2); return "slow", nvml.SUCCESS }
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := l.Snapshot(ctx, hostWith(t, nil)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		if err := l.Close(); err != nil || len(server.ShutdownCalls()) != 1 {
			t.Errorf("error %v, %d shutdowns; want one", err, len(server.ShutdownCalls()))
		}
	})
}

// A topology call is about two GPUs; the one that every such call hangs for is the one with the error.
func TestTopologyThatHangs(t *testing.T) {
	for name, hung := range map[string]int{
		"for one in the middle": 3,
		"for the first":         0,
		"for the last":          7,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, server := mocked(t)
				answer := make(chan struct{})
				for i := range server.Devices {
					d := device(server, i)
					ask := d.GetTopologyCommonAncestorFunc
					d.GetTopologyCommonAncestorFunc = func(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
						if i == hung || other == server.Devices[hung] {
							<-answer
						}
						return ask(other)
					}
				}
				for range 2 {
					s := snapshotOf(t, l, hostWith(t, nil))
					for i, d := range s.Devices {
						if d.Usable() == (i == hung) {
							t.Errorf("GPU %d has the error %q", i, d.Error)
						}
					}
					for _, link := range s.Links {
						if link.PCIe == gpu.PathUnknown {
							t.Errorf("link %+v is not known", link)
						}
					}
				}
				if n := len(l.driver.tasks.abandoned()); n != 7 {
					t.Errorf("%d calls are left behind, want the 7 of GPU %d", n, hung)
				}
				close(answer)
			})
		})
	}
}

func TestSystemCallThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		answer := make(chan struct{})
		server.DeviceGetCountFunc = func() (int, nvml.Return) { <-answer; return 8, nvml.SUCCESS }
		s, err := l.Snapshot(t.Context(), hostWith(t, nil))
		if s != nil || !errors.Is(err, ErrNoAnswer) || exit.CodeOf(err) != exit.NoDriver || exit.HintOf(err) == "" {
			t.Errorf("got %v, error %v, status %d, hint %q", s, err, exit.CodeOf(err), exit.HintOf(err))
		}
		if !strings.Contains(err.Error(), "(nvmlDeviceGetCount has not returned)") {
			t.Errorf("the error %q does not name the call", err)
		}
		if err := l.Close(); !errors.Is(err, ErrNoAnswer) || len(server.ShutdownCalls()) != 0 {
			t.Errorf("Close: error %v, %d shutdowns; want none while a call is out", err, len(server.ShutdownCalls()))
		}
		close(answer)
	})
}

// Shutting the driver down would free what a call that has not returned may use.
func TestCloseWithACallLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		answer := make(chan struct{})
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "", nvml.SUCCESS }
		snapshotOf(t, l, hostWith(t, nil))
		if err := l.Close(); !errors.Is(err, ErrNoAnswer) || len(server.ShutdownCalls()) != 0 {
			t.Errorf("error %v, %d shutdowns; want an error and none", err, len(server.ShutdownCalls()))
		}
		close(answer)
		synctest.Wait()
		again, err := open(t.Context(), l.driver, options{timeout: time.Second, host: hostWith(t, nil)})
		if err != nil {
			t.Fatal(err)
		}
		if err := again.Close(); err != nil || len(server.ShutdownCalls()) != 2 {
			t.Errorf("error %v, %d shutdowns; want as many as the driver was opened", err, len(server.ShutdownCalls()))
		}
	})
}

func TestShutdownsThatAreOwedAreNotForgotten(t *testing.T) {
	l, server := mocked(t)
	l.driver.owed.Store(2)
	failing := true
	server.ShutdownFunc = func() nvml.Return {
		if failing {
			return nvml.ERROR_UNKNOWN
		}
		return nvml.SUCCESS
	}
	if err := l.Close(); err == nil || len(server.ShutdownCalls()) != 1 {
		t.Errorf("error %v, %d shutdowns; want an error and one", err, len(server.ShutdownCalls()))
	}
	failing = false
	again, err := open(t.Context(), l.driver, options{timeout: time.Second, host: hostWith(t, nil)})
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil || len(server.ShutdownCalls()) != 4 {
		t.Errorf("error %v, %d shutdowns; want 3 more", err, len(server.ShutdownCalls()))
	}
}

func TestInitThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		answer := make(chan struct{})
		server.InitFunc = func() nvml.Return { <-answer; return nvml.SUCCESS }
		for range 2 {
			_, err := open(t.Context(), l.driver, options{timeout: time.Second, host: hostWith(t, nil)})
			if !errors.Is(err, ErrNoAnswer) || exit.CodeOf(err) != exit.NoDriver || !strings.Contains(err.Error(), "(nvmlInit has not returned)") {
				t.Errorf("got the error %v with status %d", err, exit.CodeOf(err))
			}
		}
		if n := len(server.InitCalls()); n != 1 {
			t.Errorf("nvmlInit was called %d times while it hung, want once", n)
		}
		close(answer)
		synctest.Wait()
		if n := len(server.ShutdownCalls()); n != 1 {
			t.Errorf("%d shutdowns after the late answer, want 1", n)
		}
		if _, err := open(t.Context(), l.driver, options{timeout: time.Second, host: hostWith(t, nil)}); err != nil {
			t.Errorf("after the answer: %v", err)
		}
	})
}

func TestCallerWhoGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		answer := make(chan struct{})
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "", nvml.SUCCESS }
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		s, err := l.Snapshot(ctx, hostWith(t, nil))
		if s != nil || !errors.Is(err, context.Canceled) || exit.CodeOf(err) != exit.Interrupted {
			t.Errorf("got %v, error %v, status %d; want status 130", s, err, exit.CodeOf(err))
		}
		server.InitFunc = func() nvml.Return { <-answer; return nvml.SUCCESS }
		if _, err := open(ctx, l.driver, options{timeout: time.Minute}); exit.CodeOf(err) != exit.Interrupted {
			t.Errorf("open: error %v, status %d; want status 130", err, exit.CodeOf(err))
		}
		close(answer)
	})
}

// Snapshots of several goroutines wait for each other instead of taking each other's calls for hung ones.
func TestSnapshotsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, server := mocked(t)
		server.DeviceGetCountFunc = func() (int, nvml.Return) { time.Sleep(100 * time.Millisecond); return 8, nvml.SUCCESS }
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { time.Sleep(100 * time.Millisecond); return "slow", nvml.SUCCESS }
		h, snapshots := hostWith(t, nil), make(chan *gpu.Snapshot)
		for range 5 {
			go func() {
				s, err := l.Snapshot(t.Context(), h)
				if err != nil {
					t.Error(err)
				}
				snapshots <- s
			}()
		}
		for range 5 {
			if s := <-snapshots; s != nil {
				checkSnapshot(t, s)
				if got := s.Devices[2]; got.Name != "slow" || !got.Usable() {
					t.Errorf("GPU 2 is %+v", got)
				}
			}
		}
	})
}

func TestClosedLibrary(t *testing.T) {
	l, server := mocked(t)
	for range 2 {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if n := len(server.ShutdownCalls()); n != 1 {
		t.Errorf("%d shutdowns, want 1", n)
	}
	if s, err := l.Snapshot(t.Context(), hostWith(t, nil)); s != nil || !errors.Is(err, errClosed) {
		t.Errorf("got %v and error %v, want %v", s, err, errClosed)
	}
}
