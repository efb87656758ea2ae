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
	"gpu-cdi-plugin/internal/host"
)

// These tests run in a bubble of testing/synctest, where the seconds that a driver hangs cost nothing.

func TestGPUThatHangsCostsTheOthersNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answer := make(chan struct{})
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "late", nvml.SUCCESS }
		h := createHost(t, nil)

		for range 3 {
			s := readTopology(t, session, h)
			if got := s.Devices[2]; got.Error != "does not answer (nvmlDeviceGetName has not returned)" {
				t.Errorf("GPU 2 has the error %q", got.Error)
			}
			if len(s.Links) != 21 {
				t.Errorf("%d links, want the 21 of seven GPUs", len(s.Links))
			}
		}
		synctest.Wait() // for goroutines that are about to end
		if n := countCallGoroutines(); n != 1 {
			t.Errorf("after three snapshots %d goroutines are left, want 1", n)
		}
		close(answer)
		synctest.Wait()
		if s := readTopology(t, session, h); !s.Devices[2].Usable() || s.Devices[2].Name != "late" {
			t.Errorf("after the answer GPU 2 is %+v", s.Devices[2])
		}
	})
}

// countCallGoroutines counts the goroutines that call the driver.
func countCallGoroutines() int {
	stacks := make([]byte, 1<<20)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "nvml.(*calls).start.func")
}

func TestGPUThatHangsHasWhatWasRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answer := make(chan struct{})
		d := device(server, 2)
		d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { <-answer; return nvml.Memory{}, nvml.SUCCESS }
		got := readTopology(t, session, createHost(t, nil)).Devices[2]
		if got.UUID != d.UUID || got.PCIBusID != "0000:12:00.0" || got.Minor != 2 ||
			got.Name == "" || got.MemoryBytes != 0 {
			t.Errorf("got %+v, want all that comes before the memory", got)
		}
		close(answer)
	})
}

// NVLinks that hang delay the links, and nothing else.
func TestLinksThatHangDelayNoDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answer, h := make(chan struct{}), createHost(t, nil)
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
				if got := readTopology(t, session, h); got.Devices[2].Usable() || len(got.Links) != 21 {
					t.Errorf("GPU 2 has the error %q, and there are %d links", got.Devices[2].Error, len(got.Links))
				}
			})
			synctest.Wait()
			begin := time.Now()
			got, _, err := session.read(t.Context())
			if took := time.Since(begin); err != nil || !got.Devices[2].Usable() || took > 0 {
				t.Errorf("reading the GPUs took %v: %v; GPU 2 is %+v", took, err, got.Devices[2])
			}
			reading.Wait()
		}
		synctest.Wait()
		if n := countCallGoroutines(); n != 1 {
			t.Errorf("after three readings %d goroutines are left, want 1", n)
		}
		close(answer)
		synctest.Wait()
		if s := readTopology(t, session, h); !s.Devices[2].Usable() {
			t.Errorf("after the answer GPU 2 has the error %q", s.Devices[2].Error)
		}
	})
}

// A path is about two GPUs. The GPU for which all paths hang is the one with the error.
func TestPathsThatHang(t *testing.T) {
	for name, hung := range map[string]int{
		"for one in the middle": 3,
		"for the first":         0,
		"for the last":          7,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				session, server := openMock(t)
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
					s := readTopology(t, session, createHost(t, nil))
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
				if n := session.library.calls.outstanding(); n != 7 {
					t.Errorf("%d calls are outstanding, want the 7 of GPU %d", n, hung)
				}
				close(answer)
			})
		})
	}
}

func TestDriverThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answer := make(chan struct{})
		server.DeviceGetCountFunc = func() (int, nvml.Return) { <-answer; return 8, nvml.SUCCESS }
		s, err := session.readTopology(t.Context())
		if s != nil || !errors.Is(err, gpu.ErrNotAnswering) || !errors.Is(err, gpu.ErrNoDriver) {
			t.Errorf("got %v, error %v", s, err)
		}
		if !strings.Contains(err.Error(), "(nvmlDeviceGetCount has not returned)") {
			t.Errorf("the error %q does not name the call", err)
		}
		close(answer)
	})
}

// Shutting NVML down would free what an outstanding call may use.
func TestCloseWithAnOutstandingCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answer := make(chan struct{})
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "", nvml.SUCCESS }
		readTopology(t, session, createHost(t, nil))
		if err := session.Close(); err == nil || len(server.ShutdownCalls()) != 0 || session.library == nil {
			t.Errorf("error %v, %d shutdowns; want an error and none", err, len(server.ShutdownCalls()))
		}
		close(answer)
		synctest.Wait()
		if err := session.Close(); err != nil || len(server.ShutdownCalls()) != 1 {
			t.Errorf("error %v, %d shutdowns; want one", err, len(server.ShutdownCalls()))
		}
	})
}

// Setting a compute mode delays no snapshot.
func TestComputeModeThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answer := make(chan struct{})
		server.DeviceGetHandleByUUIDFunc = func(string) (nvml.Device, nvml.Return) {
			<-answer
			return nil, nvml.ERROR_NOT_FOUND
		}
		go func() { _ = session.SetExclusive(t.Context(), "GPU-0", true) }()
		synctest.Wait()
		session.opts.Host = createHost(t, nil)
		begin := time.Now()
		if s, err := session.Snapshot(t.Context()); err != nil || len(s.Links) != 28 || time.Since(begin) > 0 {
			t.Errorf("a snapshot took %v: %v", time.Since(begin), err)
		}
		close(answer)
	})
}

func TestInitThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		l := session.library
		l.initialised = false
		answer := make(chan struct{})
		server.InitFunc = func() nvml.Return { <-answer; return nvml.SUCCESS }
		for range 2 {
			err := l.initialise(withDeadline(t, time.Second), host.Host{})
			if !errors.Is(err, gpu.ErrNotAnswering) || !strings.Contains(err.Error(), "(nvmlInit has not returned)") {
				t.Errorf("got the error %v", err)
			}
		}
		close(answer)
		synctest.Wait()
		if err := l.initialise(withDeadline(t, time.Second), host.Host{}); err != nil || len(server.InitCalls()) != 1 {
			t.Errorf("after the answer: error %v, %d calls of nvmlInit, want one", err, len(server.InitCalls()))
		}
		if err := session.Close(); err != nil || len(server.ShutdownCalls()) != 1 || l.initialised {
			t.Errorf("error %v, %d shutdowns; want one", err, len(server.ShutdownCalls()))
		}
	})
}

func TestInterruptIsNotAnErrorOfTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answer := make(chan struct{})
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "", nvml.SUCCESS }
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		s, err := session.readTopology(ctx)
		if s != nil || !errors.Is(err, context.Canceled) || errors.Is(err, gpu.ErrNoDriver) {
			t.Errorf("got %v, error %v", s, err)
		}
		close(answer)
	})
}

// Readings by several goroutines wait for each other instead of taking each other's calls for hung ones.
func TestReadingsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		const slow = 100 * time.Millisecond
		server.DeviceGetCountFunc = func() (int, nvml.Return) { time.Sleep(slow); return 8, nvml.SUCCESS }
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { time.Sleep(slow); return "slow", nvml.SUCCESS }
		session.opts.Host = createHost(t, nil)
		snapshots := make(chan *gpu.Snapshot)
		for range 5 {
			go func() {
				s, err := session.readTopology(t.Context())
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
