package nvml

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
)

// maxEventWait is the longest time that a call waits for an event. The library cannot be closed during such a call.
const maxEventWait = wake.Tick

// eventWaitSlack is how much longer than requested a wait for an event may take.
const eventWaitSlack = 1500 * time.Millisecond

const (
	// eventPause is the pause after an error before the next wait for events: if a GPU is lost, each wait fails at
	// once.
	eventPause = wake.Tick
	// eventSetLimit is how long creating an event set may take, and recoveryLimit how long reading the recovery action
	// after an event may take.
	eventSetLimit = 30 * time.Second
	recoveryLimit = 500 * time.Millisecond
)

// eventKinds are the events to receive, if the GPU supports them.
var eventKinds = map[uint64]gpu.EventKind{
	nvml.EventTypeXidCriticalError:    gpu.EventXID,
	nvml.EventTypeDoubleBitEccError:   gpu.EventECC,
	nvml.EventTypeGpuRecoveryAction:   gpu.EventRecovery,
	nvml.EventTypeGpuUnavailableError: gpu.EventUnavailable,
	nvml.EventMigConfigChange:         gpu.EventMIG,
}

// watchers receive the events of the GPUs while the library is open. Each GPU has a goroutine with its own event set:
// if a set contains a lost GPU, it returns only that GPU's error. One more goroutine receives the driver's events.
type watchers struct {
	library *library
	receive func(gpu.Event)
	// unbind records that the driver is about to be unbound from the GPU at a PCI address. It reports whether the
	// library must be closed for that now.
	unbind  func(address string) bool
	leaving func() []string // PCI addresses of the GPUs that are already being unbound
	gpus    map[string]bool // by UUID
	// handles has the UUIDs of the GPUs, by nvml.Device: the event set of a GPU can also return events of other GPUs.
	handles sync.Map
	length  time.Duration // of the longest wait for an event
	running sync.WaitGroup
	stop    chan struct{} // closed to stop the goroutines
	ended   chan struct{} // closed when all goroutines have ended
}

// errNoXIDs means that no events are received because the GPU is too old to report XIDs.
var errNoXIDs = errors.New("the driver reports no XIDs of this GPU")

// errWatchStopped means that no events are received because closing the library failed.
var errWatchStopped = errors.New("closing the library failed, since calls still use it")

// watchDriver receives the driver's events while the library is open.
func (s *Session) watchDriver() {
	if s.events == nil || s.library == nil || s.watchers != nil && !isClosed(s.watchers.ended) {
		return
	}
	known := host.ModuleGPUs(s.opts.Host)
	s.watchers = &watchers{
		library: s.library, receive: s.events, gpus: map[string]bool{}, length: s.eventWait,
		unbind: s.unbinding.want, leaving: func() []string { return host.WithoutDriver(s.opts.Host, known) },
		stop: make(chan struct{}), ended: make(chan struct{}),
	}
	s.watchers.running.Go(s.watchers.watchUnbind)
}

// watch receives the events of the driver and of the usable GPUs of the last snapshot while the library is open.
func (s *Session) watch() {
	s.watchDriver()
	if s.watchers == nil || s.last == nil {
		return
	}
	w, snapshot := s.watchers, s.last
	if w.stopped() {
		return // the next snapshot tries again
	}
	for i := range snapshot.Devices {
		uuid := snapshot.Devices[i].UUID
		if snapshot.Devices[i].Usable() && !w.gpus[uuid] {
			w.gpus[uuid] = true
			w.running.Go(func() { w.watch(uuid) })
		}
	}
}

// end stops receiving events. It reports whether all goroutines have ended before ctx did. It may be called
// repeatedly.
func (w *watchers) end(ctx context.Context) bool {
	if !w.stopped() {
		close(w.stop)
		go w.awaitEnd(ctx)
	}
	select {
	case <-w.ended:
		return true
	case <-ctx.Done():
		return false
	}
}

// awaitEnd waits until the goroutines have ended, and reports that events are no longer received, since the library is
// about to be closed. If the goroutines have not ended before ctx, it reports errWatchStopped: the library stays open.
func (w *watchers) awaitEnd(ctx context.Context) {
	defer close(w.ended)
	report := func(err error) {
		for uuid := range w.gpus {
			w.receive(w.sourceEvent(uuid, err))
		}
	}
	all := make(chan struct{})
	go func() {
		w.running.Wait()
		close(all)
	}()
	select {
	case <-all:
		report(gpu.ErrLibraryClosed)
	case <-ctx.Done():
		report(errWatchStopped)
		<-all
	}
}

func (w *watchers) stopped() bool { return isClosed(w.stop) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// watch receives the events of one GPU until it is stopped.
func (w *watchers) watch(uuid string) {
	reported := "nothing reported yet" // why events are not received, or "" if they are
	report := func(err error) {
		if text := errorText(err); text != reported && !w.stopped() {
			reported = text
			w.receive(w.sourceEvent(uuid, err))
		}
	}
	for !w.stopped() {
		report(w.receiveUntilError(uuid, report))
		w.pause()
	}
}

// pause waits after an error, before the next wait for events.
func (w *watchers) pause() {
	select {
	case <-w.stop:
	case <-time.After(wake.Next(eventPause)):
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func (w *watchers) sourceEvent(uuid string, err error) gpu.Event {
	return gpu.Event{
		GPU: uuid, GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance,
		Kind: gpu.EventSource, RecoveryAction: gpu.NoRecoveryAction, Err: err,
	}
}

// receiveUntilError creates an event set for the GPU and receives its events. It calls `report` with nil once a wait
// for events has succeeded, and with an error as long as the driver does not answer. It returns nil only if it was
// stopped.
func (w *watchers) receiveUntilError(uuid string, report func(error)) error {
	set, err := w.newSet(uuid)
	if err != nil {
		return err
	}
	defer func() {
		_, _ = askWithin(w, eventsSubject(uuid), time.Second, func(c *call) (nvml.EventData, error) {
			_, err := invoke(w.library, c, "nvmlEventSetFree", noValue(set.Free))
			return nvml.EventData{}, err
		})
	}()
	for !w.stopped() {
		c, returned := w.wait(eventsSubject(uuid), "nvmlEventSetWait", func() (nvml.EventData, nvml.Return) {
			return set.Wait(w.untilTick())
		})
		if !returned {
			report(&timeoutError{"nvmlEventSetWait"})
			select {
			case <-c.done: // the event may be the XID at which the driver stalled
			case <-w.stop:
				go w.receiveLate(c)
				return nil
			}
		}
		got, _ := c.answer.(nvml.EventData)
		switch {
		case hasCode(c.err, nvml.ERROR_TIMEOUT):
			report(nil)
		case c.err != nil:
			return c.err
		default:
			report(nil)
			w.receiveOne(&got)
		}
	}
	return nil
}

// untilTick returns how many milliseconds a wait for an event may take: all waits end together. They do not end before
// the tick, since the next one would then last less than a millisecond.
func (w *watchers) untilTick() uint32 {
	return uint32((wake.Next(w.length) + time.Millisecond - 1) / time.Millisecond)
}

// wait waits for an event. If the call does not return in time, it is abandoned.
func (w *watchers) wait(
	subject, function string, f func() (nvml.EventData, nvml.Return),
) (c *call, returned bool) {
	ctx, cancel := context.WithTimeout(context.Background(), w.length+eventWaitSlack)
	defer cancel()
	return w.library.calls.do(ctx, subject, func(c *call) (any, error) { return invoke(w.library, c, function, f) })
}

// receiveLate passes on the event of an abandoned wait that returns after watching has stopped. It makes no calls: the
// library may be closed by then, which frees the event set.
func (w *watchers) receiveLate(c *call) {
	<-c.done
	got, _ := c.answer.(nvml.EventData)
	if c.err != nil {
		return
	}
	if ev, ok := w.event(&got); ok {
		w.receive(ev)
	}
}

// newSet creates an event set for the events of a GPU.
func (w *watchers) newSet(uuid string) (nvml.EventSet, error) {
	l := w.library
	return askWithin(w, eventsSubject(uuid), eventSetLimit, func(c *call) (set nvml.EventSet, err error) {
		dev, err := l.deviceByUUID(c, uuid)
		if err != nil {
			return nil, err
		}
		w.handles.Store(dev, uuid)
		supported, err := invoke(l, c, "nvmlDeviceGetSupportedEventTypes", dev.GetSupportedEventTypes)
		if err != nil {
			return nil, err
		}
		var wanted uint64
		for kind := range eventKinds {
			wanted |= kind & supported
		}
		if wanted&nvml.EventTypeXidCriticalError == 0 {
			return nil, errNoXIDs
		}
		if set, err = invoke(l, c, "nvmlEventSetCreate", l.api.EventSetCreate); err != nil {
			return nil, err
		}
		_, err = invoke(l, c, "nvmlDeviceRegisterEvents", noValue(func() nvml.Return {
			return dev.RegisterEvents(wanted, set)
		}))
		if err != nil {
			_ = set.Free()
		}
		return set, err
	})
}

func eventsSubject(uuid string) string { return "events of " + uuid }

// askWithin does what ask does, with a time limit. If the call hangs, it does not return an earlier answer.
func askWithin[T any](w *watchers, subject string, limit time.Duration, work func(*call) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return ask(ctx, &w.library.calls, subject, 0, work)
}

// receiveOne passes an event on, with the driver's recovery action. Reading the action has its own subject: if that
// call were abandoned under the subject of the events, the next wait for events would get its answer.
func (w *watchers) receiveOne(e *nvml.EventData) {
	ev, ok := w.event(e)
	if !ok {
		return
	}
	action, err := askWithin(w, "recovery action of "+ev.GPU, recoveryLimit, func(c *call) (int, error) {
		return w.library.recoveryAction(c, e.Device)
	})
	if err == nil {
		ev.RecoveryAction = action
	}
	w.receive(ev)
}

// event converts an event, except its recovery action. It reports whether the event must be passed on: its kind is one
// of eventKinds, and its GPU is watched.
func (w *watchers) event(e *nvml.EventData) (gpu.Event, bool) {
	kind, ok := eventKinds[e.EventType]
	known, isWatched := w.handles.Load(e.Device)
	if !ok || !isWatched {
		return gpu.Event{}, false
	}
	uuid, _ := known.(string)
	ev := gpu.Event{
		GPU: uuid, GPUInstance: instance(e.GpuInstanceId), ComputeInstance: instance(e.ComputeInstanceId), Kind: kind,
		RecoveryAction: gpu.NoRecoveryAction,
	}
	if !w.library.has("nvmlEventSetWait_v2") { // the first version returns no IDs
		ev.GPUInstance, ev.ComputeInstance = gpu.NoInstance, gpu.NoInstance
	}
	if kind == gpu.EventXID {
		ev.XID = e.EventData
	}
	return ev, true
}

// instance converts the ID of an instance in an event. NVML sets all bits of the ID if there is none.
func instance(id uint32) int {
	if id == ^uint32(0) {
		return gpu.NoInstance
	}
	return int(id)
}
