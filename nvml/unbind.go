package nvml

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wake"
)

// unbindSubject is the subject (see calls) of the calls that receive unbind events.
const unbindSubject = "events of the driver"

// unbinding has the GPUs that are being unbound from the driver, by PCI address, with the time when the library was
// closed for them. The zero time means that it must still be closed. While the driver waits for other programs, it
// reports the same GPU again and again, so the library is closed for a GPU only once in a reopenPause.
type unbinding struct {
	mu   sync.Mutex
	gpus map[string]time.Time
}

// want records that the library must be closed for a GPU, and reports whether that is new.
func (u *unbinding) want(gpu string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if closed, known := u.gpus[gpu]; known && (closed.IsZero() || time.Since(closed) < reopenPause) {
		return false
	}
	if u.gpus == nil {
		u.gpus = map[string]time.Time{}
	}
	u.gpus[gpu] = time.Time{}
	return true
}

// due reports whether the library must be closed for any of the GPUs.
func (u *unbinding) due() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, closed := range u.gpus {
		if closed.IsZero() {
			return true
		}
	}
	return false
}

// closed records that the library was closed.
func (u *unbinding) closed() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for gpu, closed := range u.gpus {
		if closed.IsZero() {
			u.gpus[gpu] = time.Now()
		}
	}
}

// keep drops all other GPUs: a GPU that is gone may come back and be unbound again.
func (u *unbinding) keep(gpus []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.gpus, func(gpu string, _ time.Time) bool { return !slices.Contains(gpus, gpu) })
}

// watchUnbind waits for NVML's events that the driver is about to be unbound from a GPU, until it is stopped. The
// kernel unbinds the driver only when no program has the GPU open. If this program did not receive these events, it
// would keep the GPU open until it reopens the driver's library for another reason. Older drivers do not report them.
func (w *watchers) watchUnbind() {
	reported := "" // why events are not received, or "" if they are
	report := func(err error) {
		text := errorText(err)
		if text != "" && text != reported && !w.stopped() {
			w.receive(gpu.Event{Kind: gpu.EventUnbind, Err: err})
		}
		reported = text
	}
	for !w.stopped() {
		err := w.receiveUnbind(report)
		if isNotSupported(err) {
			return
		}
		report(err)
		w.pause()
	}
}

// receiveUnbind passes on which GPUs are already being unbound, and waits for events. It calls `report` with nil once
// the driver has answered a wait. It returns nil only if it was stopped.
func (w *watchers) receiveUnbind(report func(error)) error {
	set, err := w.newSystemSet()
	if err != nil {
		return err
	}
	defer func() {
		_, _ = askWithin(w, unbindSubject, time.Second, func(c *call) (struct{}, error) {
			return struct{}{}, w.freeSystemSet(c, set)
		})
	}()
	for _, address := range w.leaving() { // they may have begun before the event set was registered
		w.reportUnbind(address)
	}
	for !w.stopped() {
		c, returned := w.wait(unbindSubject, "nvmlSystemEventSetWait", func() (nvml.EventData, nvml.Return) {
			return waitForUnbind(w.library.api, set, w.untilTick())
		})
		if !returned {
			select {
			case <-c.done:
			case <-w.stop:
				return nil
			}
		}
		got, _ := c.answer.(nvml.EventData)
		switch {
		case hasCode(c.err, nvml.ERROR_TIMEOUT):
			report(nil)
		case c.err != nil:
			return c.err
		case got.EventType != nvml.SystemEventTypeGpuDriverUnbind:
			return errNoUnbind
		default:
			w.reportUnbind(addressOf(uint32(got.EventData)))
			select { // the driver may report the GPU again while it waits
			case <-w.stop:
			case <-time.After(wake.Next(w.length)):
			}
		}
	}
	return nil
}

// errNoUnbind means that a wait for events returned at once without an event. It is tried again later.
var errNoUnbind = errors.New("a wait for events of the driver returned none")

func (w *watchers) reportUnbind(address string) {
	if w.unbind(address) {
		w.receive(gpu.Event{Kind: gpu.EventUnbind})
	}
}

// addressOf returns the PCI address of a GPU from its ID in the kernel module.
func addressOf(id uint32) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", id>>16, id>>8&0xff, id&0xff)
}

// newSystemSet creates an event set for the events that a GPU is about to be unbound.
func (w *watchers) newSystemSet() (nvml.SystemEventSet, error) {
	l := w.library
	return askWithin(w, unbindSubject, eventSetLimit, func(c *call) (set nvml.SystemEventSet, err error) {
		set, err = invoke(l, c, "nvmlSystemEventSetCreate", func() (nvml.SystemEventSet, nvml.Return) {
			r := nvml.SystemEventSetCreateRequest{Version: nvml.STRUCT_VERSION(nvml.SystemEventSetCreateRequest{}, 1)}
			code := l.api.SystemEventSetCreate(&r)
			return r.Set, code
		})
		if err != nil {
			return set, err
		}
		_, err = invoke(l, c, "nvmlSystemRegisterEvents", noValue(func() nvml.Return {
			return l.api.SystemRegisterEvents(&nvml.SystemRegisterEventRequest{
				Version:    nvml.STRUCT_VERSION(nvml.SystemRegisterEventRequest{}, 1),
				EventTypes: nvml.SystemEventTypeGpuDriverUnbind, Set: set,
			})
		}))
		if err != nil {
			_ = w.freeSystemSet(c, set)
		}
		return set, err
	})
}

func (w *watchers) freeSystemSet(c *call, set nvml.SystemEventSet) error {
	_, err := invoke(w.library, c, "nvmlSystemEventSetFree", noValue(func() nvml.Return {
		return w.library.api.SystemEventSetFree(&nvml.SystemEventSetFreeRequest{
			Version: nvml.STRUCT_VERSION(nvml.SystemEventSetFreeRequest{}, 1), Set: set,
		})
	}))
	return err
}

// waitForUnbind waits for an event of the set. It returns the event's type, 0 for none, and the GPU's ID.
func waitForUnbind(
	api nvml.Interface, set nvml.SystemEventSet, milliseconds uint32,
) (nvml.EventData, nvml.Return) {
	var data nvml.SystemEventData_v1
	var pinner runtime.Pinner // the request contains a Go pointer for C
	pinner.Pin(&data)
	defer pinner.Unpin()
	request := nvml.SystemEventSetWaitRequest{
		Version:   nvml.STRUCT_VERSION(nvml.SystemEventSetWaitRequest{}, 1),
		Timeoutms: milliseconds, Set: set, Data: &data, DataSize: 1,
	}
	code := api.SystemEventSetWait(&request)
	if request.NumEvent == 0 {
		return nvml.EventData{}, code
	}
	return nvml.EventData{EventType: data.EventType, EventData: uint64(data.GpuId)}, code
}
