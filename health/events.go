package health

import (
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/gpu"
)

// Event counts an event of kind gpu.EventXID and returns the transitions that it causes. First says whether the XID is
// new on one of the affected devices.
func (m *Machine) Event(now time.Time, ev gpu.Event) (transitions []Transition, first bool) {
	for _, e := range m.concerned(ev) {
		before := e.condition()
		o := e.codes[ev.XID]
		if o == nil {
			o = &occurrences{}
			if len(e.codes) < maxCodes {
				e.codes[ev.XID] = o
				first = true
			}
		}
		o.count++
		if f := m.verdict(now, o, ev); f.Action.worse(Application) {
			e.reported(now, f)
		}
		transitions = e.changed(before, transitions)
	}
	return transitions, first
}

// concerned returns the devices that an event affects: the MIG devices of its instance or, if the instance is unknown,
// the GPU and its MIG devices.
func (m *Machine) concerned(ev gpu.Event) []*entry {
	ofInstance := m.matching(func(d *Device) bool {
		return d.GPU == ev.GPU && ev.GPUInstance != gpu.NoInstance && d.GPUInstance == ev.GPUInstance &&
			(ev.ComputeInstance == gpu.NoInstance || d.ComputeInstance == ev.ComputeInstance)
	})
	if len(ofInstance) > 0 {
		return ofInstance
	}
	return m.of(ev.GPU)
}

// verdict returns what an event means. The administrator's rule decides; if there is none, the driver's recovery
// action; if the driver reports none, the catalogue.
func (m *Machine) verdict(now time.Time, o *occurrences, ev gpu.Event) Finding {
	if rule, ok := m.rules.XIDs[ev.XID]; ok {
		if !o.reaches(now, rule) {
			return Finding{Action: None}
		}
		text := XIDName(ev.XID)
		if rule.Count > 1 {
			text = fmt.Sprintf("%s, %d times within %s", text, rule.Count, rule.Within)
		}
		return Finding{text, rule.Action, true}
	}
	switch f, ok := recoveryFinding(ev.RecoveryAction); {
	case ok:
		return Finding{Text: XIDName(ev.XID) + "; " + f.Text, Action: f.Action}
	case ev.RecoveryAction == gpu.NoRecoveryAction:
		return Finding{Text: XIDName(ev.XID), Action: actionOf(ev.XID)}
	default:
		return Finding{Action: None}
	}
}

// occurrences are the events of one XID on a device.
type occurrences struct {
	count  int
	recent []time.Time // the times of the last events, at most as many as the rule counts
}

// reaches adds an event and reports whether the rule's action must be taken.
func (o *occurrences) reaches(now time.Time, r Rule) bool {
	count := min(max(r.Count, 1), MaxCount)
	o.recent = append(o.recent, now)
	if len(o.recent) > count {
		o.recent = slices.Delete(o.recent, 0, len(o.recent)-count)
	}
	return len(o.recent) == count && (count == 1 || now.Sub(o.recent[0]) <= r.Within)
}
