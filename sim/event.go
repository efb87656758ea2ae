package sim

import (
	"fmt"
	"strconv"
	"time"
)

// maxEvents is how many events the state file keeps; the library has room for 256.
const maxEvents = 200

// EventType is a type of GPU event. The values are NVML's.
type EventType uint64

// Types of GPU events.
const (
	EventSingleBitECC   EventType = 0x1
	EventDoubleBitECC   EventType = 0x2
	EventXID            EventType = 0x8
	EventMIGChange      EventType = 0x100
	EventUnavailable    EventType = 0x4000
	EventRecoveryAction EventType = 0x8000
)

// Types of system events.
const (
	systemUnbind EventType = 0x1
	systemBind   EventType = 0x2
)

// Event is an event of a GPU. Event sets in which the GPU is registered receive it; event sets created later do not.
type Event struct {
	GPU  int
	Type EventType
	// Data is the code of an XID event, or the recovery action.
	Data uint64
	// Instance is the MIG device that the event is about, or nil.
	Instance *Instance
}

// Instance names a MIG device by its GPU instance and compute instance. A negative compute instance means all of the
// GPU instance.
type Instance struct{ GPU, Compute int }

// XID reports an XID error of a GPU or, if instance is not nil, of a MIG device.
func (n *Node) XID(gpu int, code uint64, instance *Instance) error {
	return n.Report(Event{GPU: gpu, Type: EventXID, Data: code, Instance: instance})
}

// Report reports events. The state file keeps the latest 200.
func (n *Node) Report(events ...Event) error {
	for _, e := range events {
		if err := n.checkEvent(e); err != nil {
			return err
		}
	}
	if len(events) > maxEvents {
		return invalid("%d events at once: want at most %d", len(events), maxEvents)
	}
	return n.updateState(func(records []record) ([]record, error) {
		for _, e := range events {
			records = addEvent(records, e.record())
		}
		return records, nil
	})
}

func (n *Node) checkEvent(e Event) error {
	if err := n.checkGPU(e.GPU); err != nil {
		return err
	}
	if e.Type == 0 || e.Type&(e.Type-1) != 0 {
		return invalid("event type %#x: want one bit", uint64(e.Type))
	}
	if e.Instance == nil {
		return nil
	}
	return n.checkInstance(e.GPU, *e.Instance)
}

// checkInstance returns an error if the GPU does not have the instance now.
func (n *Node) checkInstance(gpu int, want Instance) error {
	records, err := n.readState()
	if err != nil {
		return err
	}
	g := n.machine.GPUs[gpu]
	if err := applyMIG(&g, records); err != nil {
		return err
	}
	for _, d := range g.MIG {
		if d.GPUInstance == want.GPU && (want.Compute < 0 || d.ComputeInstance == want.Compute) {
			return nil
		}
	}
	return invalid("GPU %d has no MIG instance %s", gpu, want)
}

// String returns the ID of the GPU instance, followed by a colon and the ID of the compute instance if there is one.
func (i Instance) String() string {
	if i.Compute < 0 {
		return strconv.Itoa(i.GPU)
	}
	return fmt.Sprintf("%d:%d", i.GPU, i.Compute)
}

func (i *Instance) pairs() []pair {
	if i == nil {
		return nil
	}
	pairs := []pair{{"gi", strconv.Itoa(i.GPU)}}
	if i.Compute >= 0 {
		pairs = append(pairs, pair{"ci", strconv.Itoa(i.Compute)})
	}
	return pairs
}

func (e Event) record() record {
	r := newRecord("event", "gpu", e.GPU, "type", uint64(e.Type), "data", e.Data)
	r.pairs = append(r.pairs, e.Instance.pairs()...)
	return r
}

// addEvent appends an event with the next sequence number, and drops the oldest events if there are too many. Numbers
// keep growing even if the state was cleared, since they are never below the clock.
func addEvent(records []record, event record) []record {
	last, count := uint64(time.Now().UnixNano())-1, 0
	for _, r := range records {
		if r.name == "event" {
			count++
			text, _ := r.get("seq")
			if seq, err := strconv.ParseUint(text, 10, 64); err == nil {
				last = max(last, seq)
			}
		}
	}
	records = without(records, func(r record) bool {
		drop := r.name == "event" && count >= maxEvents
		if drop {
			count--
		}
		return drop
	})
	event.pairs = append([]pair{{"seq", strconv.FormatUint(last+1, 10)}}, event.pairs...)
	return append(records, event)
}
