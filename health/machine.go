package health

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
)

// Rules are what a Machine works with.
type Rules struct {
	// XIDs are the administrator's rules, by code. A rule decides about an event of its XID, before the recovery action
	// and the catalogue. What the driver still asks for at the next probe counts all the same.
	XIDs map[uint64]Rule
	// CleanFor is how long probes must pass before a device is healthy again; 0 is DefaultCleanFor. Each relapse within
	// an hour doubles it, up to 64 times.
	CleanFor time.Duration
}

// DefaultCleanFor is Rules.CleanFor unless it is configured.
const DefaultCleanFor = 5 * time.Second

const (
	relapseWithin = time.Hour
	afterReset    = time.Minute // while a GPU trains its links and joins the fabric again
	maxDoublings  = 6
	maxCodes      = 64  // per device
	maxAbsent     = 256 // devices that are not there and are remembered
)

// Machine has the health of all devices. Use one goroutine at a time.
type Machine struct {
	rules   Rules
	entries map[string]*entry // by UUID, also of devices that are not there now
	// baselines are what probes of GPUs are compared with, by UUID.
	baselines map[string]*baseline
	// eventsMissed is why the events of GPUs are not received, by UUID.
	eventsMissed map[string]string
}

// entry is what is known about a device.
type entry struct {
	recordedState
	present    bool
	unreadable bool // whether it is a GPU that could not be read, whose MIG devices are not known
	resetAt    time.Time
	clean      time.Time // since when all probes pass; zero if they do not
	codes      map[uint64]*occurrences
}

// New returns a machine without devices.
func New(rules Rules) *Machine {
	rules.CleanFor = cmp.Or(rules.CleanFor, DefaultCleanFor)
	return &Machine{
		rules: rules, entries: map[string]*entry{}, baselines: map[string]*baseline{}, eventsMissed: map[string]string{},
	}
}

// SetDevices sets the devices that are there, each GPU before its MIG devices. A new one is healthy, or as its GPU is;
// so is a MIG device that was created again. Any other that comes back is as it was. Unreadable are the UUIDs of the
// GPUs that could not be read: it is not known which MIG devices they have.
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

// created returns the entry of a device that is new, or of a MIG device that was destroyed and created again while its
// GPU was there: what it had is gone, and only an administrator ends a cordon.
func (m *Machine) created(now time.Time, d Device) *entry {
	e := &entry{recordedState: recordedState{State: Healthy, Since: now}}
	if parent := m.entries[d.GPU]; parent != nil { // what is wrong with the GPU is wrong with it too
		*e = *parent
	}
	e.codes, e.LeftInUse, e.CannotReset = map[uint64]*occurrences{}, "", "" // these concern the GPU alone
	if old := m.entries[d.UUID]; old != nil {
		e.Cordon, e.CordonSince = old.Cordon, old.CordonSince
	}
	return e
}

// forget drops devices that are not there, if there are too many of them: MIG devices before GPUs, those without a
// cordon before others, and then those that were absent for longest.
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

// reported takes what an event means. What the device needs by it is remembered until it is done, even if something
// worse is known already.
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

// fault makes a device suspect or unhealthy. One that is unhealthy stays so.
func (e *entry) fault(now time.Time, f Finding) {
	e.clean = time.Time{}
	to := Unhealthy
	if f.Action == Probe && e.State != Unhealthy {
		to = Suspect
	}
	if e.State == Suspect && to == Suspect {
		return
	}
	settling := f.Action == None && now.Sub(e.resetAt) < afterReset // no relapse
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

// WasReset notes that a GPU was reset. Clean probes then make it healthy, unless it needs more than that.
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

// SetCannotReset notes why a GPU cannot be reset, until it is reset, the driver changes or the node reboots.
func (m *Machine) SetCannotReset(gpu, reason string) {
	if e := m.entries[gpu]; e != nil {
		e.CannotReset = reason
	}
}

// CannotReset is why a GPU cannot be reset, or empty.
func (m *Machine) CannotReset(gpu string) string {
	if e := m.entries[gpu]; e != nil {
		return e.CannotReset
	}
	return ""
}

// needed is what a device needs by events, whatever probes find; its Action is empty if that is nothing.
func (e *entry) needed() Finding {
	if e.Rule.Action.worse(e.Event.Action) {
		return e.Rule
	}
	return e.Event
}

// SetLeftInUse marks a device as in use after its last container, for a reason, or with an empty reason no longer. One
// that is healthy otherwise is suspect while it is marked, whatever its probes find.
func (m *Machine) SetLeftInUse(now time.Time, uuid, reason string) []Transition {
	e := m.entries[uuid]
	if e == nil || !e.present {
		return nil
	}
	before := e.condition()
	if (e.LeftInUse == "") != (reason == "") {
		e.LeftInUseSince = now
	}
	e.LeftInUse = reason
	return e.changed(before, nil)
}

// LeftInUse reports whether a device is marked by SetLeftInUse, whatever its state is.
func (m *Machine) LeftInUse(uuid string) bool {
	e := m.entries[uuid]
	return e != nil && e.present && e.LeftInUse != ""
}

// SuspectAll makes the devices that are there suspect for a reason, as a part of a sentence, until their probes pass.
func (m *Machine) SuspectAll(now time.Time, reason string) {
	for _, e := range m.matching(func(*Device) bool { return true }) {
		e.fault(now, Finding{Text: reason, Action: Probe})
	}
}

// Statuses are those of the devices that are there, by UUID.
func (m *Machine) Statuses() map[string]Status {
	all := map[string]Status{}
	for uuid, e := range m.entries {
		if e.present {
			all[uuid] = m.status(e)
		}
	}
	return all
}

// status is that of a device, with what concerns the process alone.
func (m *Machine) status(e *entry) Status {
	s := e.status()
	s.EventsMissed = m.eventsMissed[e.UUID]
	return s
}

// SetEventsMissed notes why the events of a GPU are not received or, if that is empty, that they are. Of several
// reasons the first is kept, which says most. It reports whether it has changed anything.
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

// StatusWithoutCordon is the status of a device without regard to a cordon, HoldForReset or SetLeftInUse, and false for
// one that is not there.
func (m *Machine) StatusWithoutCordon(uuid string) (Status, bool) {
	e := m.entries[uuid]
	if e == nil || !e.present {
		return Status{}, false
	}
	s := e.status()
	s.State, s.Reason, s.Since = e.State, e.Reason, e.Since
	return s, true
}

// NeedsFrequentProbes reports whether probes may soon make a device healthy: one that is neither cordoned, held for a
// reset, nor in need of a reboot or service.
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
	switch {
	case e.Cordon != "":
		s.Since = e.CordonSince
	case c.state == Cordoned:
		s.Since = e.HeldSince
	case e.State == Healthy && e.LeftInUseSince.After(e.Since):
		s.Since = e.LeftInUseSince
	}
	if len(e.codes) > 0 {
		s.XIDs = map[uint64]int{}
		for code, o := range e.codes {
			s.XIDs[code] = o.count
		}
	}
	return s
}

// condition is what a device's transitions are about.
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
	case e.State == Healthy && e.LeftInUse != "":
		return condition{Suspect, e.LeftInUse}
	}
	return condition{e.State, e.Reason}
}

// changed adds the transition from the condition before, if there is one.
func (e *entry) changed(before condition, list []Transition) []Transition {
	after := e.condition()
	if after == before {
		return list
	}
	return append(list, Transition{before.state, e.status()})
}

// of are the GPU and its MIG devices, as far as they are there.
func (m *Machine) of(gpu string) []*entry {
	return m.matching(func(d *Device) bool { return d.GPU == gpu })
}

// matching returns the devices that are there and wanted, by UUID.
func (m *Machine) matching(wanted func(*Device) bool) []*entry {
	var list []*entry
	for _, uuid := range slices.Sorted(maps.Keys(m.entries)) {
		if e := m.entries[uuid]; e.present && wanted(&e.Device) {
			list = append(list, e)
		}
	}
	return list
}
