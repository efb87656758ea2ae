package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
)

// receive handles an event of the driver. When it returns, the resulting state is published.
func (m *Monitor) receive(e gpu.Event) {
	if m.opts.Observer != nil && e.Kind != gpu.EventSource {
		m.opts.Observer.Event(e)
	}
	switch e.Kind {
	case gpu.EventXID:
		m.receiveXID(e)
	case gpu.EventSource:
		m.setSource(e)
	default: // the next probe shows what the event means for the device
		m.logFirst(e)
	}
	m.probeNow.Wake()
}

// logFirst logs an event if it is the first of its kind on the GPU.
func (m *Monitor) logFirst(e gpu.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	line := fmt.Sprintf("%s reported %s; further events of this kind are only counted", m.names[e.GPU], eventTexts[e.Kind])
	if m.names[e.GPU] != "" && !m.loggedEvents[line] {
		m.loggedEvents[line] = true
		m.log.Info(line)
	}
}

var eventTexts = map[gpu.EventKind]string{
	gpu.EventECC:         "an uncorrected memory error: the next probes decide whether its devices stay healthy",
	gpu.EventRecovery:    "that its recovery action has changed",
	gpu.EventUnavailable: "that it is not available: the next probes decide whether its devices stay healthy",
	gpu.EventMIG:         "that its MIG devices have changed",
}

func (m *Monitor) receiveXID(e gpu.Event) {
	m.mu.Lock()
	if !m.machine.Knows(e.GPU) {
		m.retainXID(e)
		m.mu.Unlock()
		return
	}
	transitions, first := m.machine.Event(time.Now(), e)
	name := m.names[e.GPU]
	m.mu.Unlock()
	if first && len(transitions) == 0 {
		m.log.Info(fmt.Sprintf("%s reported %s; its devices keep their state; further events of this code are only counted",
			name, health.XIDName(e.XID)))
	}
	m.report(transitions)
}

// retainXID keeps an XID until its GPU is known. Equal events share an entry, so that a GPU with many events leaves
// room for other GPUs.
func (m *Monitor) retainXID(e gpu.Event) {
	i := slices.IndexFunc(m.waitingXIDs, func(x waitingXID) bool { return x.Event == e })
	switch {
	case i >= 0:
		m.waitingXIDs[i].count++
	case len(m.waitingXIDs) < maxWaitingXIDs:
		m.waitingXIDs = append(m.waitingXIDs, waitingXID{e, 1})
	}
}

func (m *Monitor) setSource(e gpu.Event) {
	if m.opts.Observer != nil {
		m.opts.Observer.EventSource(e.GPU, e.Err == nil)
	}
	if errors.Is(e.Err, gpu.ErrLibraryClosed) {
		m.beginGap()
		return
	}
	m.endGap()
	why := ""
	if e.Err != nil {
		why = e.Err.Error()
	}
	m.mu.Lock()
	changed := m.machine.SetEventsMissed(e.GPU, why)
	m.unsaved = m.unsaved || changed
	m.mu.Unlock()
	if changed {
		m.changed()
	}
}

// beginGap records that the driver's library is closed, so that no events are received.
func (m *Monitor) beginGap() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed.IsZero() {
		m.closed = time.Now()
	}
}

// expectGap records that the library was closed because nothing used a GPU, so that no event is missed.
func (m *Monitor) expectGap() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = time.Time{}
}

// endGap records that the library is open again. If events were not received for long, it logs that.
func (m *Monitor) endGap() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed.IsZero() {
		return
	}
	if gap := time.Since(m.closed); gap > maxGap {
		m.log.Warn(fmt.Sprintf("events of the GPUs were not received for %s, while the driver's library was closed: "+
			`see lines with "NVRM: Xid" in the kernel's log for XIDs of that time`, gap.Round(time.Second)))
	}
	m.closed = time.Time{}
}
