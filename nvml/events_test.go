package nvml

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// testEventWait is how long a call waits for an event in tests.
const testEventWait = 200 * time.Millisecond

// newEventSession is newTestSession with the events of the node, after a first snapshot.
func newEventSession(t *testing.T, machine string) (*Session, *sim.Node, chan gpu.Event) {
	t.Helper()
	session, node, _ := newTestSession(t, machine)
	events := make(chan gpu.Event, 1000)
	session.events = func(e gpu.Event) { events <- e }
	takeSnapshot(t, session)
	for range node.Machine().GPUs {
		if e := nextEvent(t, events); e.Kind != gpu.EventSource || e.Err != nil {
			t.Fatalf("the first event is %+v, want that events are received", e)
		}
	}
	return session, node, events
}

func nextEvent(t *testing.T, events chan gpu.Event) gpu.Event {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(20 * time.Second):
		t.Fatal("there is no event")
		return gpu.Event{}
	}
}

func uuidOf(node *sim.Node, index int) string { return node.Machine().GPUs[index].UUID }

func TestEventsAreReceived(t *testing.T) {
	if !runAlone(t) {
		return
	}
	_, node, events := newEventSession(t, "mig-h100")
	testenv.Must(t, node.XID(2, 79, nil))
	want := gpu.Event{
		GPU: uuidOf(node, 2), GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance, Kind: gpu.EventXID, XID: 79,
	}
	if diff := cmp.Diff(want, nextEvent(t, events)); diff != "" {
		t.Errorf("an XID of a GPU (-want +got):\n%s", diff)
	}
	testenv.Must(t, node.SetSilently(2, map[string]string{"recovery-action": "reboot"}))
	testenv.Must(t, node.XID(2, 31, nil))
	want.XID, want.RecoveryAction = 31, 2
	if diff := cmp.Diff(want, nextEvent(t, events)); diff != "" {
		t.Errorf("an XID of a GPU that needs a reboot (-want +got):\n%s", diff)
	}
	testenv.Must(t, node.Fail("nvmlDeviceGetFieldValues", 2, 3)) // NVML_ERROR_NOT_SUPPORTED
	testenv.Must(t, node.XID(2, 31, nil))
	want.RecoveryAction = gpu.NoRecoveryAction
	if diff := cmp.Diff(want, nextEvent(t, events)); diff != "" {
		t.Errorf("an XID with an older driver (-want +got):\n%s", diff)
	}
	snapshot, err := node.Snapshot()
	testenv.Must(t, err)
	mig := snapshot.Devices[0].MIG[0]
	testenv.Must(t, node.XID(0, 94, &sim.Instance{GPU: mig.GPUInstance, Compute: mig.ComputeInstance}))
	want = gpu.Event{
		GPU: uuidOf(node, 0), GPUInstance: mig.GPUInstance, ComputeInstance: mig.ComputeInstance,
		Kind: gpu.EventXID, XID: 94,
	}
	if diff := cmp.Diff(want, nextEvent(t, events)); diff != "" {
		t.Errorf("an XID of a MIG device (-want +got):\n%s", diff)
	}
	for kind, report := range map[gpu.EventKind]func() error{
		gpu.EventMIG:         func() error { return node.DisableMIG(1) },
		gpu.EventECC:         func() error { return node.Set(1, map[string]string{"ecc-uncorrected": "7"}) },
		gpu.EventRecovery:    func() error { return node.Set(1, map[string]string{"recovery-action": "reset"}) },
		gpu.EventUnavailable: func() error { return node.Report(sim.Event{GPU: 1, Type: sim.EventUnavailable}) },
	} {
		testenv.Must(t, report())
		if e := nextEvent(t, events); e.Kind != kind || e.GPU != uuidOf(node, 1) {
			t.Errorf("the event is %+v, want %s of GPU 1", e, kind)
		}
	}
}

// A set with a lost GPU returns that error at once, again and again.
func TestALostGPUNeitherHidesEventsNorSpins(t *testing.T) {
	if !runAlone(t) {
		return
	}
	_, node, events := newEventSession(t, "dgx-h100")
	testenv.Must(t, node.Lose(1))
	if e := nextEvent(t, events); e.Kind != gpu.EventSource || e.Err == nil || e.GPU != uuidOf(node, 1) {
		t.Errorf("the event is %+v, want that events of the lost GPU are not received", e)
	}
	for i := range node.Machine().GPUs {
		if i != 1 {
			testenv.Must(t, node.XID(i, 79, nil))
			if e := nextEvent(t, events); e.Kind != gpu.EventXID || e.GPU != uuidOf(node, i) {
				t.Errorf("the event is %+v, want the XID of GPU %d", e, i)
			}
		}
	}
	testenv.Must(t, node.Clear())
	for e := nextEvent(t, events); e.Err != nil; e = nextEvent(t, events) {
	}
	testenv.Must(t, node.XID(1, 31, nil))
	if e := nextEvent(t, events); e.XID != 31 || e.GPU != uuidOf(node, 1) {
		t.Errorf("the event is %+v, want the XID of the GPU that came back", e)
	}
}

// While the library is closed, the events of all GPUs are lost.
func TestALostGPUHidesNoEventsOfTheOthers(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, node.Lose(1))
	opened := session.watchers
	for code := range uint64(20) {
		testenv.Must(t, node.XID(0, 100+code, nil))
		takeSnapshot(t, session)
	}
	for code := range uint64(20) {
		expectXID(t, events, 100+code)
	}
	if session.watchers != opened {
		t.Error("the library was closed within a minute after it was opened")
	}
	session.opened = session.opened.Add(-reopenPause)
	if takeSnapshot(t, session); session.watchers == opened {
		t.Error("the library was not opened again after a minute")
	}
}

// The kernel waits with unbinding a GPU until the library is closed.
func TestAGPUThatIsUnboundIsClosed(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, node.Unbind(2)) // which does not wait for this process
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind; e = nextEvent(t, events) {
	}
	testenv.Must(t, node.Bind(2)) // the kernel's list is as before
	began := time.Now()
	if n := len(takeSnapshot(t, session).Devices); n != 4 {
		t.Errorf("%d GPUs", n)
	}
	if session.unbinding.due() || time.Since(began) > 3*testEventWait {
		t.Errorf("the library was not opened again, or after %v", time.Since(began))
	}
	isSource := func(e gpu.Event) bool { return e.Kind == gpu.EventSource && e.Err == nil && e.GPU == uuidOf(node, 2) }
	for e := nextEvent(t, events); !isSource(e); e = nextEvent(t, events) {
	}
	sendXID(t, node, events, 2, 31)
	testenv.Must(t, node.Unbind(1)) // it is received again
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind; e = nextEvent(t, events) {
	}
	if n := len(takeSnapshot(t, session).Devices); n != 3 {
		t.Errorf("%d GPUs, want 3", n)
	}
}

// The kernel waits for the library also if unbinding began while the library was being opened, which the driver does
// not report. If it then waits for another program, the library must not be closed again and again.
func TestAGPUWhoseUnbindingHasBegun(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, session.Close())
	testenv.Must(t, os.Remove(createNodeHost(t, node).Sys("bus", "pci", "devices", node.Machine().GPUs[2].Bus, "driver")))
	testenv.Must(t, session.Open(t.Context()))
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind; e = nextEvent(t, events) {
	}
	opened := session.watchers
	takeSnapshot(t, session)
	if session.watchers == opened {
		t.Error("the library was not closed")
	}
	expectSources(t, node, events, true)
	opened = session.watchers
	if session.unbinding.want(node.Machine().GPUs[2].Bus) {
		t.Error("the unbinding is reported twice")
	}
	if takeSnapshot(t, session); session.watchers != opened {
		t.Error("the library was closed again without a pause")
	}
	testenv.Must(t, node.Unbind(1)) // which the other does not hide
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind; e = nextEvent(t, events) {
	}
}

// A wait that returns without an event says nothing of a GPU.
func TestAWaitWithoutAnEventOfTheDriver(t *testing.T) {
	for returned, want := range map[nvml.SystemEventSetWaitRequest]nvml.EventData{
		{}:            {},
		{NumEvent: 1}: {EventType: nvml.SystemEventTypeGpuDriverUnbind, EventData: 0x12ab00},
	} {
		api := &mock.Interface{SystemEventSetWaitFunc: func(r *nvml.SystemEventSetWaitRequest) nvml.Return {
			r.NumEvent, r.Data.EventType, r.Data.GpuId = returned.NumEvent, nvml.SystemEventTypeGpuDriverUnbind, 0x12ab00
			return nvml.SUCCESS
		}}
		if got, _ := waitForUnbind(api, nvml.SystemEventSet{}, 1000); got != want {
			t.Errorf("with %d events it is %+v, want %+v", returned.NumEvent, got, want)
		}
	}
	if got := addressOf(0x12ab00); got != "0012:ab:00.0" {
		t.Errorf("the address is %s", got)
	}
}

// Whoever uses the library keeps it open, and the kernel waits.
func TestAGPUThatIsUnboundIsClosedAfterTheLastCall(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	returned := make(chan bool, 10)
	session.changed = func() { returned <- true }
	using, release, ended := make(chan bool), make(chan bool), make(chan error)
	go func() {
		_, err := withLibrary(t.Context(), session, "a test", func(*library, *call) (bool, error) {
			close(using)
			<-release
			return true, nil
		})
		ended <- err
	}()
	<-using
	testenv.Must(t, node.Unbind(2))
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind; e = nextEvent(t, events) {
	}
	opened := session.watchers
	if takeSnapshot(t, session); session.watchers != opened {
		t.Error("the library was closed while it was in use")
	}
	close(release)
	testenv.Must(t, <-ended)
	select {
	case <-returned:
	case <-time.After(10 * time.Second):
		t.Fatal("no caller learned that the library can be closed")
	}
	if takeSnapshot(t, session); session.watchers == opened {
		t.Error("the library was not closed")
	}
}

// The kernel still lists a GPU that is being unbound. If it is bound again soon, the list never changes.
func TestAGPUThatIsBoundAgainIsInTheNextSnapshot(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	count := func(want int) {
		t.Helper()
		if got := len(takeSnapshot(t, session).Devices); got != want {
			t.Errorf("%d GPUs, want %d", got, want)
		}
	}
	testenv.Must(t, node.Unbind(2))
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind; e = nextEvent(t, events) {
	}
	listed := filepath.Join(node.Root(), "proc/driver/nvidia/gpus", node.Machine().GPUs[2].Bus)
	testenv.Must(t, os.Mkdir(listed, 0o755))
	count(3)
	testenv.Must(t, os.Remove(listed))
	testenv.Must(t, node.Bind(2))
	count(4)
}

// An old driver is no reason for a message, and any other error is tried again.
func TestUnbindingThatIsNotReported(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, session.Close())
	fail(t, node, "nvmlSystemRegisterEvents", sim.AnyGPU, nvml.ERROR_NOT_SUPPORTED)
	takeSnapshot(t, session)
	ended := make(chan struct{})
	go func() {
		session.watchers.watchUnbind()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("an old driver is asked again and again")
	}
	for len(events) > 0 {
		if e := <-events; e.Kind == gpu.EventUnbind {
			t.Errorf("of an old driver it is reported that %v", e.Err)
		}
	}
	testenv.Must(t, node.Clear())
	testenv.Must(t, session.Close())
	fail(t, node, "nvmlSystemRegisterEvents", sim.AnyGPU, nvml.ERROR_UNKNOWN)
	takeSnapshot(t, session)
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind; e = nextEvent(t, events) {
	}
	testenv.Must(t, node.Clear())
	testenv.Must(t, node.Unbind(2))
	for e := nextEvent(t, events); e.Kind != gpu.EventUnbind || e.Err != nil; e = nextEvent(t, events) {
	}
}

// An error that comes again is reported once, and tried again after the same pause each time.
func TestErrorsOfTheDriversEventsAreTriedAgainSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		session, server := openMock(t)
		answers := []nvml.Return{
			nvml.ERROR_UNKNOWN, nvml.ERROR_UNKNOWN, nvml.ERROR_UNKNOWN, nvml.ERROR_UNKNOWN,
			nvml.ERROR_TIMEOUT, nvml.ERROR_UNKNOWN, nvml.ERROR_NOT_SUPPORTED,
		}
		server.SystemEventSetCreateFunc = func(*nvml.SystemEventSetCreateRequest) nvml.Return { return nvml.SUCCESS }
		server.SystemRegisterEventsFunc = func(*nvml.SystemRegisterEventRequest) nvml.Return { return nvml.SUCCESS }
		server.SystemEventSetFreeFunc = func(*nvml.SystemEventSetFreeRequest) nvml.Return { return nvml.SUCCESS }
		server.SystemEventSetWaitFunc = func(*nvml.SystemEventSetWaitRequest) nvml.Return {
			answer := answers[0]
			answers = answers[1:]
			return answer
		}
		reported := 0
		w := &watchers{
			library: session.library, length: time.Second, stop: make(chan struct{}), leaving: func() []string { return nil },
			receive: func(gpu.Event) { reported++ },
		}
		began := time.Now()
		w.watchUnbind()
		if took := time.Since(began); reported != 2 || took != 5*eventPause {
			t.Errorf("%d reports in %v, want one for each time that the driver failed, and 5 pauses", reported, took)
		}
	})
}

func TestEventsAreReceivedAfterTheLibraryWasClosed(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, session.Close())
	for range node.Machine().GPUs {
		if e := nextEvent(t, events); e.Kind != gpu.EventSource || !errors.Is(e.Err, gpu.ErrLibraryClosed) {
			t.Errorf("the event is %+v, want that events are not received", e)
		}
	}
	testenv.Must(t, node.XID(1, 31, nil)) // nothing receives it, and it is not reported later
	takeSnapshot(t, session)
	for range node.Machine().GPUs {
		if e := nextEvent(t, events); e.Kind != gpu.EventSource || e.Err != nil {
			t.Errorf("the event is %+v, want that events are received", e)
		}
	}
	testenv.Must(t, node.XID(1, 32, nil))
	if e := nextEvent(t, events); e.XID != 32 {
		t.Errorf("the event is %+v, want XID 32", e)
	}
}

// A call that does not return must not be interrupted by the end of the library.
func TestTheLibraryStaysOpenWhileAWaitForEventsHangs(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, node.Hang("nvmlEventSetWait_v2", sim.AnyGPU))
	for range node.Machine().GPUs {
		if e := nextEvent(t, events); e.Kind != gpu.EventSource || e.Err == nil {
			t.Errorf("the event is %+v, want that events are not received", e)
		}
	}
	if err := session.Close(); err == nil {
		t.Error("the library was closed while a call was in it")
	}
	testenv.Must(t, node.Clear())
	waitUntil(t, "the library can be closed", func() bool { return session.Close() == nil })
}

func TestProbes(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, _ := newTestSession(t, "dgx-h100")
	takeSnapshot(t, session)
	probe := func() []gpu.Probe {
		t.Helper()
		list, err := session.Probes(t.Context())
		testenv.Must(t, err)
		return list
	}
	before := probe()
	want := gpu.Probe{
		UUID: uuidOf(node, 3), NVLinks: 1<<18 - 1, Fabric: gpu.FabricCompleted, ShutdownTemperature: 92,
		Temperature: before[3].Temperature,
	}
	if diff := cmp.Diff(want, before[3]); diff != "" || want.Temperature == 0 {
		t.Errorf("a healthy GPU (-want +got):\n%s", diff)
	}
	testenv.Must(t, node.Set(3, map[string]string{
		"recovery-action": "99", "remap-pending": "1", "remap-failed": "1", "ecc-uncorrected": "7",
		"links-down": "0,4", "fabric-state": "in-progress", "temperature": "91",
	}))
	want.RecoveryAction, want.RemapPending, want.RemapFailed, want.UncorrectedECC = 99, true, true, 7
	want.NVLinks, want.Fabric, want.Temperature = 1<<18-1-1-1<<4, gpu.FabricStarting, 91
	got := probe()
	if diff := cmp.Diff(want, got[3]); diff != "" {
		t.Errorf("an unhealthy GPU (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before[4], got[4]); diff != "" {
		t.Errorf("its neighbour has changed (-want +got):\n%s", diff)
	}
	for health, fabric := range map[string]gpu.Fabric{
		"unhealthy": gpu.FabricUnhealthy, "limited-capacity": gpu.FabricCompleted, "not-supported": gpu.FabricCompleted,
	} {
		testenv.Must(t, node.Set(3, map[string]string{"fabric-state": "completed", "fabric-health": health}))
		if got := probe()[3].Fabric; got != fabric {
			t.Errorf("a GPU whose fabric is %s has the state %d", health, got)
		}
	}
	fail(t, node, "nvmlDeviceGetGpuFabricInfoV", 3, nvml.ERROR_ARGUMENT_VERSION_MISMATCH) // of an older driver
	testenv.Must(t, node.Set(3, map[string]string{"fabric-health": "unhealthy"}))
	if got := probe()[3].Fabric; got != gpu.FabricCompleted {
		t.Errorf("a GPU whose fabric's health is not reported has the state %d", got)
	}
	testenv.Must(t, node.Lose(3))
	for _, when := range []string{"lost", "lost, and unreadable in the snapshot"} {
		if got := probe(); got[3].Error == "" || !got[3].Lost || got[4].Error != "" || got[4].Lost {
			t.Errorf("a GPU that is %s: %+v; its neighbour: %+v", when, got[3], got[4])
		}
		takeSnapshot(t, session)
	}
}

// A code that is not about the GPU as a whole leaves one reading unknown.
func TestProbesWithFunctionsThatFail(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, _ := newTestSession(t, "mig-h100")
	const mig, plain = 0, 2
	testenv.Must(t, node.DisableMIG(plain))
	takeSnapshot(t, session)
	for _, g := range []int{mig, plain} {
		testenv.Must(t, node.Set(g, map[string]string{"recovery-action": "99", "remap-pending": "1", "ecc-uncorrected": "7"}))
	}
	probe := func(g int) gpu.Probe {
		t.Helper()
		list, err := session.Probes(t.Context(), uuidOf(node, g))
		testenv.Must(t, err)
		list[0].Temperature = 0 // it changes
		return list[0]
	}
	for _, g := range []int{mig, plain} {
		before := probe(g)
		if before.Error != "" || before.UncorrectedECC != 7 || before.MIGEnabled != (g == mig) {
			t.Fatalf("GPU %d is %+v", g, before)
		}
		for function, unknown := range map[string]func(p *gpu.Probe){
			"nvmlDeviceGetFieldValues":               func(p *gpu.Probe) { p.RecoveryAction = gpu.NoRecoveryAction },
			"nvmlDeviceGetRemappedRows":              func(p *gpu.Probe) { p.RemapPending = false },
			"nvmlDeviceGetRetiredPagesPendingStatus": func(*gpu.Probe) {},
			"nvmlDeviceGetTotalEccErrors":            func(*gpu.Probe) {},
			"nvmlDeviceGetNvLinkState":               func(*gpu.Probe) {},
			"nvmlDeviceGetGpuFabricInfo":             func(p *gpu.Probe) { p.Fabric = gpu.NoFabric },
			"nvmlDeviceGetMigMode":                   func(*gpu.Probe) {},
			"nvmlDeviceGetTemperature":               func(*gpu.Probe) {},
			"nvmlDeviceGetTemperatureThreshold":      func(p *gpu.Probe) { p.ShutdownTemperature = 0 },
		} {
			fail(t, node, function, g, nvml.ERROR_UNKNOWN)
			want := before
			unknown(&want)
			if diff := cmp.Diff(want, probe(g)); diff != "" {
				t.Errorf("%s of GPU %d fails (-want +got):\n%s", function, g, diff)
			}
			fail(t, node, function, g, nvml.SUCCESS)
		}
	}
	for code, lost := range map[nvml.Return]bool{
		nvml.ERROR_NOT_FOUND: true, nvml.ERROR_GPU_IS_LOST: true, nvml.ERROR_UNKNOWN: false,
	} {
		fail(t, node, "nvmlDeviceGetHandleByUUID", plain, code)
		if got := probe(plain); got.Error == "" || got.Lost != lost {
			t.Errorf("a handle with the code %v: %+v", code, got)
		}
	}
	fail(t, node, "nvmlDeviceGetHandleByUUID", plain, nvml.SUCCESS)
	fail(t, node, "nvmlDeviceGetTemperature", plain, nvml.ERROR_RESET_REQUIRED)
	if got := probe(plain); got.Error == "" || got.Lost || !got.NeedsReset {
		t.Errorf("a GPU that needs a reset: %+v", got)
	}
}

// Before nvmlEventSetWait_v2 an event did not name an instance.
func TestEventsOfAnOldDriverNameNoInstance(t *testing.T) {
	session, server := openMock(t)
	session.library.has = func(function string) bool { return function == "nvmlEventSetWait" }
	var got gpu.Event
	w := &watchers{library: session.library, receive: func(e gpu.Event) { got = e }}
	w.handles.Store(device(server, 1), "GPU-1")
	w.receiveOne(&nvml.EventData{
		Device: device(server, 1), EventType: nvml.EventTypeXidCriticalError, EventData: 31,
	})
	want := gpu.Event{
		GPU: "GPU-1", GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance, Kind: gpu.EventXID, XID: 31,
		RecoveryAction: gpu.NoRecoveryAction,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A driver takes an empty set of events without an error.
func TestAGPUWithoutXIDsIsReported(t *testing.T) {
	session, server := openMock(t)
	d := device(server, 1)
	d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return nvml.EventTypePState, nvml.SUCCESS }
	d.RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS }
	server.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return &mock.EventSet{}, nvml.SUCCESS }
	w := &watchers{library: session.library}
	if _, err := w.newSet(d.UUID); !errors.Is(err, errNoXIDs) {
		t.Errorf("the error is %v, want %v", err, errNoXIDs)
	}
	d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return nvml.EventTypeXidCriticalError, nvml.SUCCESS }
	if _, err := w.newSet(d.UUID); err != nil {
		t.Error(err)
	}
}

// The set of a GPU can return events of others: the device in the event decides.
func TestAnEventIsOfTheDeviceThatItNames(t *testing.T) {
	session, server := openMock(t)
	server.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return &mock.EventSet{}, nvml.SUCCESS }
	w := &watchers{library: session.library}
	for _, i := range []int{5, 6} {
		d := device(server, i)
		d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return nvml.EventTypeXidCriticalError, nvml.SUCCESS }
		d.RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS }
		if _, err := w.newSet(d.UUID); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, i := range []int{6, 5, 4} { // GPU 4 is not watched
		e := nvml.EventData{Device: device(server, i), EventType: nvml.EventTypeXidCriticalError, EventData: 79}
		if ev, ok := w.event(&e); ok {
			got = append(got, ev.GPU)
		}
	}
	if want := []string{device(server, 6).UUID, device(server, 5).UUID}; !slices.Equal(got, want) {
		t.Errorf("the events are of %v, want %v", got, want)
	}
}

// expectSources waits until the events of all GPUs are received, or of none.
func expectSources(t *testing.T, node *sim.Node, events chan gpu.Event, received bool) {
	t.Helper()
	for left := len(node.Machine().GPUs); left > 0; {
		if e := nextEvent(t, events); e.Kind == gpu.EventSource && (e.Err == nil) == received {
			left--
		}
	}
}

// sendXID reports an XID and waits for it.
func sendXID(t *testing.T, node *sim.Node, events chan gpu.Event, index int, xid uint64) {
	t.Helper()
	testenv.Must(t, node.XID(index, xid, nil))
	expectXID(t, events, xid)
}

// expectXID waits for an XID.
func expectXID(t *testing.T, events chan gpu.Event, xid uint64) gpu.Event {
	t.Helper()
	for {
		if e := nextEvent(t, events); e.Kind == gpu.EventXID && e.XID == xid {
			return e
		}
	}
}

func TestEventsAreReceivedWhileTheLibraryIsInUse(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, node.Hang("nvmlDeviceGetMemoryInfo_v2", 1))
	used := make(chan error)
	go func() {
		_, err := session.Use(t.Context(), uuidOf(node, 1))
		used <- err
	}()
	waitUntil(t, "the call hangs", func() bool {
		return slices.ContainsFunc(InFlight(), func(c string) bool { return strings.Contains(c, "use of") })
	})
	if session.Close() == nil {
		t.Error("the library was closed while a call was in it")
	}
	sendXID(t, node, events, 2, 31)
	testenv.Must(t, node.Clear())
	testenv.Must(t, <-used)
}

// A wait for events that hangs ends the receiving of all events, and then the library cannot be closed.
func TestEventsAreReceivedAfterAReleaseThatFailed(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, node.Hang("nvmlEventSetWait_v2", sim.AnyGPU))
	expectSources(t, node, events, false)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if session.Release(ctx) == nil {
		t.Error("the library was closed while a call was in it")
	}
	testenv.Must(t, node.Clear())
	expectSources(t, node, events, true)
	sendXID(t, node, events, 2, 31)
}

// A driver may stall at an XID. The wait that returns late has it, also if watching was stopped meanwhile.
func TestEventsOfAWaitThatHangsAreReceived(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	const wait = "nvmlEventSetWait_v2"
	testenv.Must(t, node.Hang(wait, sim.AnyGPU))
	expectSources(t, node, events, false)
	testenv.Must(t, node.XID(1, 95, nil))
	fail(t, node, wait, sim.AnyGPU, nvml.SUCCESS)
	if e := expectXID(t, events, 95); e.GPU != uuidOf(node, 1) || e.RecoveryAction != 0 {
		t.Errorf("the event is %+v", e)
	}
	for i := range node.Machine().GPUs { // a wait that has not returned yet would not be reported to hang again
		testenv.Must(t, node.XID(i, 31, nil))
		if e := expectXID(t, events, 31); e.GPU != uuidOf(node, i) {
			t.Errorf("the event is %+v", e)
		}
	}
	testenv.Must(t, node.Hang(wait, sim.AnyGPU))
	expectSources(t, node, events, false)
	testenv.Must(t, node.XID(2, 94, nil))
	if !session.watchers.end(t.Context()) || session.Close() == nil {
		t.Error("watching goes on, or the library was closed while a call was in it")
	}
	fail(t, node, wait, sim.AnyGPU, nvml.SUCCESS)
	if e := expectXID(t, events, 94); e.GPU != uuidOf(node, 2) || e.RecoveryAction != gpu.NoRecoveryAction {
		t.Errorf("the event is %+v", e)
	}
}

// Events that their receiver does not take in time keep the library open. They are then reported as not received, and
// received again as soon as they can be.
func TestEventsAfterACloseThatFailed(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, events := newEventSession(t, "pcie-quad")
	testenv.Must(t, session.Close())
	session.opts.GPUTimeout = 2 * time.Second
	taken := make(chan struct{})
	receive := session.events
	session.events = func(e gpu.Event) {
		receive(e)
		if e.Kind == gpu.EventXID && e.XID == 31 {
			<-taken
		}
	}
	takeSnapshot(t, session)
	expectSources(t, node, events, true)
	sendXID(t, node, events, 1, 31)
	if session.Close() == nil {
		t.Error("the library was closed while an event was received")
	}
	expectSources(t, node, events, false)
	close(taken)
	waitUntil(t, "the goroutines have ended", func() bool { return isClosed(session.watchers.ended) })
	takeSnapshot(t, session)
	expectSources(t, node, events, true)
	sendXID(t, node, events, 2, 32)
}
