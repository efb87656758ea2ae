package nvml

import (
	"runtime"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// unbindSubject is the subject of calls about events of the driver.
const unbindSubject = "events of the driver"

// watchUnbind receives that the driver is about to be unbound from a GPU, until it has, or is stopped. The kernel sends
// its uevent only after that, and until then it waits for all programs that have the GPU open: without this event for
// ever. Older drivers do not report it.
func (w *watchers) watchUnbind() {
	for pause := minEventPause; !w.stopped(); pause = min(2*pause, maxEventPause) {
		err := w.receiveUnbind()
		switch {
		case err == nil || isNotSupported(err):
			return
		case pause == minEventPause && !w.stopped():
			w.receive(gpu.Event{Kind: gpu.EventUnbind, Err: err})
		}
		select {
		case <-w.stop:
		case <-time.After(pause):
		}
	}
}

// receiveUnbind waits for the event and passes it on. It returns nil after that, and if it was stopped.
func (w *watchers) receiveUnbind() error {
	set, err := w.newSystemSet()
	if err != nil {
		return err
	}
	defer func() {
		_, _ = receiveCall(w, unbindSubject, time.Second, func(c *call) (struct{}, error) {
			return struct{}{}, w.freeSystemSet(c, set)
		})
	}()
	for !w.stopped() {
		c, returned := w.wait(unbindSubject, "nvmlSystemEventSetWait", func() (nvml.EventData, nvml.Return) {
			return nvml.EventData{}, waitForUnbind(w.library.api, set)
		})
		if !returned {
			select {
			case <-c.done:
			case <-w.stop:
				return nil
			}
		}
		switch {
		case c.err == nil:
			w.unbind()
			w.receive(gpu.Event{Kind: gpu.EventUnbind})
			return nil
		case !hasCode(c.err, nvml.ERROR_TIMEOUT):
			return c.err
		}
	}
	return nil
}

// newSystemSet makes a system event set with the unbinding of GPUs.
func (w *watchers) newSystemSet() (nvml.SystemEventSet, error) {
	l := w.library
	return receiveCall(w, unbindSubject, maxEventPause, func(c *call) (set nvml.SystemEventSet, err error) {
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

// waitForUnbind waits for an event of the set, at most eventWait.
func waitForUnbind(api nvml.Interface, set nvml.SystemEventSet) nvml.Return {
	var data nvml.SystemEventData_v1
	var pinner runtime.Pinner // the request leads C to it
	pinner.Pin(&data)
	defer pinner.Unpin()
	return api.SystemEventSetWait(&nvml.SystemEventSetWaitRequest{
		Version:   nvml.STRUCT_VERSION(nvml.SystemEventSetWaitRequest{}, 1),
		Timeoutms: uint32(eventWait.Milliseconds()), Set: set, Data: &data, DataSize: 1,
	})
}
