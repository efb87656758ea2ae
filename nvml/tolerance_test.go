package nvml

import (
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	mockserver "github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// tolerated is how long the sessions of these tests tolerate a call.
const tolerated = 4 * time.Second

// openTolerantMock is openMock with a session that tolerates calls that hang. It counts abandoned calls that return.
func openTolerantMock(t *testing.T) (session *Session, server *mockserver.Server, returned *atomic.Int32) {
	t.Helper()
	session, server = openMock(t)
	returned = new(atomic.Int32)
	session.opts.Host = createHost(t, nil)
	session.opts.Timeout, session.opts.GPUTimeout = 30*time.Second, toleratedDivisor*tolerated
	session.library.calls.whenReturned(func() { returned.Add(1) })
	return session, server, returned
}

// readDevicesIn reads the GPUs, and checks how long that takes.
func readDevicesIn(t *testing.T, session *Session, want time.Duration) *gpu.Snapshot {
	t.Helper()
	begin := time.Now()
	s, _, err := session.read(t.Context())
	testenv.Must(t, err)
	if took := time.Since(begin); took != want {
		t.Errorf("it took %v, want %v", took, want)
	}
	return s
}

func TestGPUThatNeverAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server, returned := openTolerantMock(t)
		answer := make(chan struct{})
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "late", nvml.SUCCESS }
		for _, want := range []time.Duration{maxWait, 0, 0} {
			d := readDevicesIn(t, session, want).Devices[2]
			if d.Usable() || d.UUID != device(server, 2).UUID || d.Minor != 2 {
				t.Errorf("GPU 2 is %+v, want an error and what was read", d)
			}
		}
		close(answer)
		synctest.Wait()
		if d := readDevicesIn(t, session, 0).Devices[2]; !d.Usable() || d.Name != "late" || returned.Load() != 1 {
			t.Errorf("after its answer, which was reported %d times, GPU 2 is %+v", returned.Load(), d)
		}
	})
}

func TestGPUThatStopsAnswering(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server, returned := openTolerantMock(t)
		before := readDevicesIn(t, session, 0).Devices[2]
		answer := make(chan struct{})
		device(server, 2).GetUUIDFunc = func() (string, nvml.Return) { <-answer; return before.UUID, nvml.SUCCESS }
		for _, c := range []struct {
			waits, then time.Duration
			usable      bool
		}{
			{maxWait, 2 * time.Second, true},
			{0, 999 * time.Millisecond, true},
			{0, time.Millisecond, true},
			{0, 0, false},
		} {
			d := readDevicesIn(t, session, c.waits).Devices[2]
			if d.Usable() != c.usable || d.Name != before.Name || d.UUID != before.UUID || d.Minor != 2 {
				t.Errorf("GPU 2 is %+v, want it usable %v", d, c.usable)
			}
			time.Sleep(c.then)
		}
		close(answer)
		synctest.Wait()
		if d := readDevicesIn(t, session, 0).Devices[2]; !d.Usable() || returned.Load() != 1 {
			t.Errorf("after its answer, which was reported %d times, GPU 2 is %+v", returned.Load(), d)
		}
	})
}

// A GPU whose calls take longer than a snapshot waits is usable once they have returned.
func TestGPUThatIsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server, _ := openTolerantMock(t)
		d := device(server, 2)
		const slow = 2 * maxWait / 3
		d.GetNameFunc = func() (string, nvml.Return) { time.Sleep(slow); return "slow", nvml.SUCCESS }
		d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { time.Sleep(slow); return nvml.Memory{}, nvml.SUCCESS }
		if got := readDevicesIn(t, session, maxWait).Devices[2]; got.Usable() {
			t.Errorf("the first time GPU 2 is %+v, want an error", got)
		}
		for range 5 {
			time.Sleep(5 * time.Second)
			if got := readDevicesIn(t, session, maxWait).Devices[2]; !got.Usable() || got.Name != "slow" {
				t.Errorf("GPU 2 is %+v, want what was read", got)
			}
		}
		time.Sleep(5 * time.Second)
	})
}

// The last answer of a GPU that fails and then hangs is its failure.
func TestGPUThatFailsAndHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server, _ := openTolerantMock(t)
		readDevicesIn(t, session, 0)
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST }
		readDevicesIn(t, session, 0)
		answer := make(chan struct{})
		defer close(answer)
		device(server, 2).GetNameFunc = func() (string, nvml.Return) { <-answer; return "", nvml.ERROR_GPU_IS_LOST }
		if got := readDevicesIn(t, session, maxWait).Devices[2]; got.Usable() {
			t.Errorf("GPU 2 is %+v, want an error", got)
		}
	})
}

// The driver has the whole timeout for its first answer only.
func TestDriverThatStopsAnswering(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server, returned := openTolerantMock(t)
		server.DeviceGetCountFunc = func() (int, nvml.Return) { time.Sleep(20 * time.Second); return 8, nvml.SUCCESS }
		readDevicesIn(t, session, 20*time.Second)
		answer := make(chan struct{})
		server.DeviceGetCountFunc = func() (int, nvml.Return) { <-answer; return 8, nvml.SUCCESS }
		if s := readDevicesIn(t, session, maxWait); len(s.Devices) != 8 || s.DriverVersion == "" {
			t.Errorf("while it is tolerated: %+v", s)
		}
		time.Sleep(tolerated)
		_, _, err := session.read(t.Context())
		checkError(t, err, gpu.ErrNotAnswering, "it does not answer (nvmlDeviceGetCount has not returned)")
		close(answer)
		synctest.Wait()
		readDevicesIn(t, session, 0)
		if returned.Load() != 1 {
			t.Errorf("its answer was reported %d times", returned.Load())
		}
	})
}

func TestLinksThatStopAnswering(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server, _ := openTolerantMock(t)
		s, handles, err := session.read(t.Context())
		testenv.Must(t, err)
		before, unread := session.readLinks(t.Context(), s, handles)
		if len(before) != 28 || len(unread) > 0 {
			t.Fatalf("%d links, unread are %v", len(before), unread)
		}
		answer := make(chan struct{})
		device(server, 2).GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) {
			<-answer
			return 0, nvml.ERROR_UNKNOWN
		}
		for _, c := range []struct {
			took  time.Duration
			known bool
		}{{maxWait, true}, {0, false}} {
			begin := time.Now()
			links, unread := session.readLinks(t.Context(), s, handles)
			if took := time.Since(begin); took != c.took || len(links) != 28 || (len(unread) == 0) != c.known {
				t.Errorf("it took %v, %d links, unread are %v", took, len(links), unread)
			}
			for _, link := range links {
				if link.NVLinks != 12 || link.PCIe == gpu.PathUnknown {
					t.Errorf("link %+v is not what was known", link)
				}
			}
			time.Sleep(tolerated)
		}
		close(answer)
	})
}

// The kernel module shows the UUID of a GPU that does not answer, if it knows it.
func TestGPUThatHangsIsIdentifiedByTheKernel(t *testing.T) {
	const uuid = "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c"
	info := "Model: \t\t NVIDIA A100\nIRQ:   \t\t 102\nGPU UUID: \t " + uuid + "\nDevice Minor: \t 5\n"
	for name, c := range map[string]struct {
		text, uuid string
		minor      int
	}{
		"it is known":          {info, uuid, 5},
		"it is not known yet":  {strings.ReplaceAll(info, uuid, "GPU-????????-????-????-????-????????????"), "", 5},
		"it is something else": {strings.ReplaceAll(info, uuid, "GPU-../../etc"), "", 5},
		"there is no file":     {"", "", gpu.NoMinor},
		"the minor is none":    {strings.ReplaceAll(info, " 5\n", " -5\n"), uuid, gpu.NoMinor},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				session, server, _ := openTolerantMock(t)
				answer := make(chan struct{})
				defer close(answer)
				device(server, 2).GetUUIDFunc = func() (string, nvml.Return) { <-answer; return "", nvml.ERROR_UNKNOWN }
				files := map[string]string{filepath.Join("proc/driver/nvidia/gpus/0000:12:00.0/information"): c.text}
				for i := range 8 {
					dir := "sys/bus/pci/devices/0000:1" + string(rune('0'+i)) + ":00.0/"
					files[dir+"vendor"], files[dir+"class"], files[dir+"numa_node"] = "0x10de\n", "0x030200\n", "1\n"
				}
				session.opts.Host = createHost(t, files)
				d := readDevicesIn(t, session, maxWait).Devices[2]
				if d.UUID != c.uuid || d.Minor != c.minor || d.PCIBusID != "0000:12:00.0" ||
					d.NUMANode != 1 || d.Usable() {
					t.Errorf("GPU 2 is %+v, want the UUID %q and the minor %d", d, c.uuid, c.minor)
				}
			})
		})
	}
}

// A path that the driver does not return is the same in sysfs.
func TestSysfsPathIsTheDrivers(t *testing.T) {
	for _, machine := range sim.Machines() {
		node := createNode(t, machine)
		h, s := createNodeHost(t, node), node.Machine().Snapshot("1.0")
		for _, link := range s.Links {
			if got := sysfsPath(h, &s.Devices[link.A], &s.Devices[link.B]); got != link.PCIe {
				t.Errorf("%s: GPUs %d and %d: %v, and the driver returns %v", machine, link.A, link.B, got, link.PCIe)
			}
		}
	}
}

// A probe that is late has the values of the one before, until the GPU has not answered for too long.
func TestAProbeThatIsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server, _ := openTolerantMock(t)
		var err error
		session.last, _, err = session.read(t.Context())
		testenv.Must(t, err)
		d, answer := device(server, 2), make(chan struct{})
		const none = nvml.ERROR_NOT_SUPPORTED
		d.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { return none }
		d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 0, false, false, none }
		d.GetRetiredPagesPendingStatusFunc = func() (nvml.EnableState, nvml.Return) { return 0, none }
		d.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) { return 0, none }
		d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) { return nvml.GpuFabricInfo{}, none }
		d.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 0, none }
		d.GetTemperatureThresholdFunc = func(nvml.TemperatureThresholds) (uint32, nvml.Return) { return 0, none }
		d.GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return 0, none }
		probe := func() gpu.Probe {
			list, err := session.Probes(t.Context(), d.UUID)
			testenv.Must(t, err)
			return list[0]
		}
		before := probe()
		d.GetMigModeFunc = func() (int, int, nvml.Return) { <-answer; return 0, 0, nvml.SUCCESS }
		late := before
		late.Late = true
		for _, then := range []time.Duration{0, tolerated - 2*maxWait, 0} {
			time.Sleep(then)
			if got := probe(); got != late {
				t.Errorf("while the GPU may be late, the probe is %+v, want %+v", got, late)
			}
		}
		time.Sleep(maxWait)
		if got := probe(); got.Late || got.Error == "" {
			t.Errorf("after that it is %+v, want an error", got)
		}
		close(answer)
		synctest.Wait()
		if got := probe(); got != before {
			t.Errorf("after its answer it is %+v, want %+v", got, before)
		}
	})
}
