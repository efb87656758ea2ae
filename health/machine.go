package health

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
)

// Rules configure a Machine.
type Rules struct {
	// XIDs are the administrator's rules, by XID. When an event arrives, its rule takes precedence over the recovery
	// action and the catalogue. But if the next probe still reports a recovery action, that one counts.
	XIDs map[uint64]Rule
	// CleanFor is how long probes must pass before a device is healthy again; 0 means DefaultCleanFor. Each relapse
	// within an hour doubles the time, up to 64 times.
	CleanFor time.Duration
}

// DefaultCleanFor is the default of Rules.CleanFor.
const DefaultCleanFor = 5 * time.Second

const (
	relapseWithin = time.Hour
	afterReset    = time.Minute // meanwhile a GPU trains its links and joins the fabric again
	maxDoublings  = 6
	maxCodes      = 64  // for each device
	maxAbsent     = 256 // absent devices that are remembered
)

// Machine tracks the health of all devices. It must not be used concurrently.
type Machine struct {
	rules   Rules
	entries map[string]*entry // by UUID, including absent devices
	// baselines has, by UUID, the state with which the next probe of a GPU is compared.
	baselines map[string]*baseline
	// eventsMissed says why the events of GPUs are not received, by UUID.
	eventsMissed map[string]string
}

// entry is what is known about a device.
type entry struct {
	recordedState
	present    bool
	unreadable bool // whether it is a GPU that could not be read, so that its MIG devices are unknown
	resetAt    time.Time
	clean      time.Time // since when all probes pass; zero if they fail
	codes      map[uint64]*occurrences
}

// New returns a Machine without devices.
func New(rules Rules) *Machine {
	rules.CleanFor = cmp.Or(rules.CleanFor, DefaultCleanFor)
	return &Machine{
		rules: rules, entries: map[string]*entry{}, baselines: map[string]*baseline{}, eventsMissed: map[string]string{},
	}
}

// SetDevices sets the devices that are present, each GPU before its MIG devices. A new device is healthy, or has the
// state of its GPU. The same holds for a MIG device that was created again. Any other device that comes back has its
// earlier state. Unreadable has the UUIDs of GPUs that could not be read, so that their MIG devices are unknown.
func (m *Machine) SetDevices(now time.Time, devices []Device, unreadable ...string) {
	before := map[string]bool{}
	for uuid, e := range m.entries {
		before[uuid], e.present = e.present && !e.unreadable, false
	}
	for _, d := range devices {
		e := m.entries[d.UUID]
		if e == nil || !before[d.UUID] && before[d.GPU] {
			e = m.created(now, d)
			m.entries[d.UUID] = e
		}
		e.Device, e.present, e.Seen = d, true, now.Truncate(24*time.Hour)
		e.unreadable = slices.Contains(unreadable, d.UUID)
	}
	m.forget()
}

// created returns the entry of a new device, or of a MIG device that was destroyed and created again while its GPU was
// present. The earlier state of such a MIG device is dropped, except a cordon, which only an administrator ends.
func (m *Machine) created(now time.Time, d Device) *entry {
	e := &entry{recordedState: recordedState{State: Healthy, Since: now}}
	if parent := m.entries[d.GPU]; parent != nil { // a fault of the GPU is a fault of its MIG devices too
		*e = *parent
	}
	e.codes, e.InUse, e.CannotReset = map[uint64]*occurrences{}, "", "" // these concern only the GPU
	if old := m.entries[d.UUID]; old != nil {
		e.Cordon, e.CordonSince = old.Cordon, old.CordonSince
	}
	return e
}

// forget drops absent devices if there are too many: first MIG devices, then GPUs; among them first those without a
// cordon, and then those that were absent for longest.
func (m *Machine) forget() {
	var absent []*entry
	for _, e := range m.entries {
		if !e.present {
			absent = append(absent, e)
		}
	}
	worth := func(e *entry) (n int) {
		if e.UUID == e.GPU {
			n += 2
		}
		if e.Cordon != "" {
			n++
		}
		return n
	}
	slices.SortFunc(absent, func(a, b *entry) int {
		return cmp.Or(worth(a)-worth(b), a.Seen.Compare(b.Seen), strings.Compare(a.UUID, b.UUID))
	})
	for _, e := range absent[:max(0, len(absent)-maxAbsent)] {
		delete(m.entries, e.UUID)
		delete(m.baselines, e.UUID)
		delete(m.eventsMissed, e.UUID)
	}
}

// reported applies the finding of an event. The action that the device needs is remembered until it is carried out,
// even if the device has a worse fault.
func (e *entry) reported(now time.Time, f Finding) {
	if f.Action.worse(Probe) {
		source := &e.Event
		if f.byRule {
			source = &e.Rule
		}
		if f.Action.worse(source.Action) {
			*source = f
		}
	}
	if e.State == Unhealthy && !f.Action.worse(e.Remedy) {
		e.clean = time.Time{}
		return
	}
	e.fault(now, f)
}

// fault makes a device suspect or unhealthy. An unhealthy device stays unhealthy.
func (e *entry) fault(now time.Time, f Finding) {
	e.clean = time.Time{}
	to := Unhealthy
	if f.Action == Probe && e.State != Unhealthy {
		to = Suspect
	}
	if e.State == Suspect && to == Suspect {
		return
	}
	settling := f.Action == None && now.Sub(e.resetAt) < afterReset // then it is no relapse
	if e.State == Healthy && !settling {
		if now.Sub(e.Recovered) > relapseWithin {
			e.Relapses = 0
		}
		e.Relapses++
	}
	if e.State != to {
		e.Since = now
	}
	e.State, e.Reason, e.Remedy = to, f.Text, f.Action
}

// WasReset records that a GPU was reset. Clean probes then make the GPU healthy, unless it needs more than a reset.
func (m *Machine) WasReset(now time.Time, gpu string) {
	for _, e := range m.of(gpu) {
		e.resetAt, e.Relapses, e.CannotReset = now, 0, ""
		for _, f := range []*Finding{&e.Event, &e.Rule} {
			if !f.Action.worse(Reset) {
				*f = Finding{}
			}
		}
	}
}

// SetCannotReset records why a GPU cannot be reset. The record ends when the GPU is reset, the driver changes or the
// host reboots.
func (m *Machine) SetCannotReset(gpu, reason string) {
	if e := m.entries[gpu]; e != nil {
		e.CannotReset = reason
	}
}

// CannotReset returns why a GPU cannot be reset, or "".
func (m *Machine) CannotReset(gpu string) string {
	if e := m.entries[gpu]; e != nil {
		return e.CannotReset
	}
	return ""
}

// needed returns what a device needs because of events, whatever probes find. Its Action is empty if that is nothing.
func (e *entry) needed() Finding {
	if e.Rule.Action.worse(e.Event.Action) {
		return e.Rule
	}
	return e.Event
}

// SetInUse marks a device as in use although no container holds it, for a reason; an empty reason removes the mark. A
// device that is otherwise healthy is suspect while it is marked, whatever probes find.
func (m *Machine) SetInUse(now time.Time, uuid, reason string) []Transition {
	e := m.entries[uuid]
	if e == nil || !e.present {
		return nil
	}
	before := e.condition()
	if (e.InUse == "") != (reason == "") {
		e.InUseSince = now
	}
	e.InUse = reason
	return e.changed(before, nil)
}

// InUse reports whether a device is marked as in use, whatever its state.
func (m *Machine) InUse(uuid string) bool {
	e := m.entries[uuid]
	return e != nil && e.present && e.InUse != ""
}

// SuspectAll makes all present devices suspect until their probes pass. The reason is part of a sentence.
func (m *Machine) SuspectAll(now time.Time, reason string) {
	for _, e := range m.matching(func(*Device) bool { return true }) {
		e.fault(now, Finding{Text: reason, Action: Probe})
	}
}

// Statuses returns the statuses of the present devices, by UUID.
func (m *Machine) Statuses() map[string]Status {
	all := map[string]Status{}
	for uuid, e := range m.entries {
		if e.present {
			all[uuid] = m.status(e)
		}
	}
	return all
}

// status returns the status of a device, including what is known only in this process.
func (m *Machine) status(e *entry) Status {
	s := e.status()
	s.EventsMissed = m.eventsMissed[e.UUID]
	return s
}

// SetEventsMissed records why the events of a GPU are not received; an empty text means that they are. If there is a
// reason already, that one is kept: the first is the most specific. The result says whether anything changed.
func (m *Machine) SetEventsMissed(gpu, why string) (changed bool) {
	before, missed := m.eventsMissed[gpu]
	switch {
	case why == "":
		delete(m.eventsMissed, gpu)
	case !missed:
		m.eventsMissed[gpu] = why
	}
	return m.eventsMissed[gpu] != before
}

// StatusWithoutCordon returns the status that a device would have without a cordon, HoldForReset and SetInUse. For
// an absent device it returns false.
func (m *Machine) StatusWithoutCordon(uuid string) (Status, bool) {
	e := m.entries[uuid]
	if e == nil || !e.present {
		return Status{}, false
	}
	s := e.status()
	s.State, s.Reason, s.Since, s.InUse = e.State, e.Reason, e.Since, false
	return s, true
}

// NeedsFrequentProbes reports whether probes may soon make a device healthy: one that is neither cordoned nor held for
// a reset, and needs no reboot or service.
func (m *Machine) NeedsFrequentProbes() bool {
	for _, e := range m.entries {
		waits := e.condition().state == Cordoned || e.needed().Action.worse(Reset)
		if e.present && e.State != Healthy && !waits {
			return true
		}
	}
	return false
}

func (e *entry) status() Status {
	c := e.condition()
	s := Status{UUID: e.UUID, State: c.state, Reason: c.reason, Remedy: e.Remedy, Since: e.Since}
	s.InUse = s.State == Suspect && e.State == Healthy
	switch {
	case e.Cordon != "":
		s.Since = e.CordonSince
	case c.state == Cordoned:
		s.Since = e.HeldSince
	case e.State == Healthy && e.InUseSince.After(e.Since):
		s.Since = e.InUseSince
	}
	if len(e.codes) > 0 {
		s.XIDs = map[uint64]int{}
		for code, o := range e.codes {
			s.XIDs[code] = o.count
		}
	}
	return s
}

// condition is the part of a device's state whose change is a transition.
type condition struct {
	state  State
	reason string
}

func (e *entry) condition() condition {
	switch {
	case e.Cordon != "":
		return condition{Cordoned, "cordoned: " + e.Cordon}
	case !e.HeldSince.IsZero():
		return condition{Cordoned, e.Hold}
	case e.State == Healthy && e.InUse != "":
		return condition{Suspect, e.InUse}
	}
	return condition{e.State, e.Reason}
}

// changed adds a transition to the list if the device's condition is not the earlier one any more.
func (e *entry) changed(before condition, list []Transition) []Transition {
	after := e.condition()
	if after == before {
		return list
	}
	return append(list, Transition{before.state, e.status()})
}

// of returns the GPU and its MIG devices that are present.
func (m *Machine) of(gpu string) []*entry {
	return m.matching(func(d *Device) bool { return d.GPU == gpu })
}

// matching returns the present devices for which wanted returns true, by UUID.
func (m *Machine) matching(wanted func(*Device) bool) []*entry {
	var list []*entry
	for _, uuid := range slices.Sorted(maps.Keys(m.entries)) {
		if e := m.entries[uuid]; e.present && wanted(&e.Device) {
			list = append(list, e)
		}
	}
	return list
}
