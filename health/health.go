// Package health decides which devices are healthy. Events and probes of GPUs go in; a state with its reason and its
// remedy comes out for each device.
//
// A Machine is pure: it touches nothing and has no clock. Each input has its time, in the order of the inputs. The
// package knows XIDs and the recovery action, and nothing else of NVIDIA's.
package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// State is the health of a device. Only a healthy device is given to containers.
type State string

// The states.
const (
	Healthy State = "healthy"
	// Suspect is a device about which something was reported that says nothing by itself. Probes decide. It is not given
	// to containers: they would lose work that no one can bring back, while a device that is held back for some seconds
	// costs little.
	Suspect State = "suspect"
	// Unhealthy is a device that needs its Remedy, or whose probes do not pass.
	Unhealthy State = "unhealthy"
	// Recovering is a device whose probes pass again, but not yet for long enough.
	Recovering State = "recovering"
	// Cordoned is a device that an administrator took out of service.
	Cordoned State = "cordoned"
)

// NoInstance is the ID of the instance of a device or event that is a whole GPU's.
const NoInstance = -1

// Device is a GPU, or a MIG device of one.
type Device struct {
	// UUID is the device's, and GPU that of the GPU that it is on, or its own.
	UUID, GPU string
	// GPUInstance and ComputeInstance are a MIG device's, or NoInstance.
	GPUInstance, ComputeInstance int
}

// Event is an XID of a GPU.
type Event struct {
	// GPU is the UUID.
	GPU string
	// GPUInstance and ComputeInstance are what of the GPU the event concerns, or NoInstance for all of it.
	GPUInstance, ComputeInstance int
	XID                          uint64
	// Recovery is the GPU's recovery action after the event, or NoRecovery if it is unknown.
	Recovery Recovery
}

// Finding is what a probe found wrong with a GPU.
type Finding struct {
	// Text is a part of a sentence, such as "a row remapping is pending".
	Text string
	// Action is what the GPU needs; None if the finding can pass by itself.
	Action Action

	byRule bool // whether an administrator's rule says so
}

// probes are the result of a probe of a GPU.
type probes struct {
	gpu string // UUID
	// lost is whether the GPU did not answer at all. One that answers again was initialised anew, as by a reset.
	lost     bool
	recovery Recovery
	findings []Finding
}

// Status is the health of a device at one time.
type Status struct {
	UUID  string `json:"uuid"`
	State State  `json:"state"`
	// Reason is why the device is not healthy, as a part of a sentence.
	Reason string `json:"reason,omitempty"`
	// Remedy is what it needs.
	Remedy Action `json:"remedy,omitempty"`
	// Since is when the device came to its State.
	Since time.Time `json:"since"`
	// XIDs counts the events of each code.
	XIDs map[uint64]int `json:"xids,omitempty"`
}

// Transition is a change of a device's state or reason.
type Transition struct {
	From State
	To   Status
}

// Rules are what a Machine works with.
type Rules struct {
	// XIDs are the administrator's rules. They overrule the catalogue and the recovery action.
	XIDs map[uint64]Rule
	// CleanFor is how long probes must pass before a device is healthy again; 0 is DefaultCleanFor. Each relapse within
	// an hour doubles it, up to 64 times.
	CleanFor time.Duration
}

// DefaultCleanFor is Rules.CleanFor unless it is configured.
const DefaultCleanFor = 5 * time.Second

const (
	relapseWithin = time.Hour
	settlesWithin = time.Minute // after a reset
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
}

// entry is what is known about a device.
type entry struct {
	device  Device
	present bool
	seen    time.Time // when it was last present

	state   State // without regard to cordon
	reason  string
	remedy  Action
	since   time.Time
	byEvent bool // whether an event made it unhealthy, so that clean probes alone do not prove the contrary
	byRule  bool // whether that was by an administrator's rule, so that the driver does not prove it either
	lost    bool // whether it was lost at the last probe
	reset   bool // whether it was reset since it became unhealthy
	resetAt time.Time

	cordon      string // why an administrator took it out of service; empty if not
	cordonSince time.Time
	heldSince   time.Time // since when it is held back for a reset of its GPU; zero if it is not

	clean     time.Time // since when all probes pass; zero if they do not
	relapses  int
	recovered time.Time // when it last became healthy

	codes map[uint64]*occurrences
}

// occurrences are the events of an XID.
type occurrences struct {
	count  int
	recent []time.Time // as many of the last ones as the rule counts
}

// New returns a machine without devices.
func New(rules Rules) *Machine {
	rules.CleanFor = cmp.Or(rules.CleanFor, DefaultCleanFor)
	return &Machine{rules: rules, entries: map[string]*entry{}, baselines: map[string]*baseline{}}
}

// SetDevices tells the machine which devices there are. A new one is healthy, or as its GPU is, as is a MIG device that
// was created again. Any other that comes back is as it was. List a GPU before its MIG devices.
func (m *Machine) SetDevices(now time.Time, devices []Device) {
	before := map[string]bool{}
	for uuid, e := range m.entries {
		before[uuid], e.present = e.present, false
	}
	for _, d := range devices {
		e := m.entries[d.UUID]
		if e == nil || !before[d.UUID] && before[d.GPU] {
			e = m.created(now, d)
			m.entries[d.UUID] = e
		}
		e.device, e.present, e.seen = d, true, now
	}
	m.forget()
}

// created returns the entry of a device that is new, or of a MIG device that was destroyed and created again while its
// GPU was there: what it had is gone, and only an administrator ends a cordon.
func (m *Machine) created(now time.Time, d Device) *entry {
	e := newEntry(now, m.entries[d.GPU])
	if old := m.entries[d.UUID]; old != nil {
		e.cordon, e.cordonSince = old.cordon, old.cordonSince
	}
	return e
}

// newEntry returns a new device. What is wrong with its GPU, if that is another entry, is wrong with it too.
func newEntry(now time.Time, parent *entry) *entry {
	e := &entry{state: Healthy, since: now}
	if parent != nil {
		*e = *parent
	}
	e.codes = map[uint64]*occurrences{}
	return e
}

// forget drops the devices that were absent for longest, if there are too many of them.
func (m *Machine) forget() {
	var absent []*entry
	for _, e := range m.entries {
		if !e.present {
			absent = append(absent, e)
		}
	}
	slices.SortFunc(absent, func(a, b *entry) int {
		return cmp.Or(a.seen.Compare(b.seen), strings.Compare(a.device.UUID, b.device.UUID))
	})
	for _, e := range absent[:max(0, len(absent)-maxAbsent)] {
		delete(m.entries, e.device.UUID)
		delete(m.baselines, e.device.UUID)
	}
}

// Event counts an event and returns the transitions that it causes. First is whether the code is new on one of the
// devices that it concerns.
func (m *Machine) Event(now time.Time, ev Event) (transitions []Transition, first bool) {
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
			e.fault(now, f, true)
		}
		transitions = e.changed(before, transitions)
	}
	return transitions, first
}

// concerned are the devices that an event hits, sorted: the MIG devices of its instance, or the GPU and all on it. An
// event of an instance that is not known concerns the whole GPU.
func (m *Machine) concerned(ev Event) []*entry {
	ofInstance := m.matching(func(d *Device) bool {
		return d.GPU == ev.GPU && ev.GPUInstance != NoInstance && d.GPUInstance == ev.GPUInstance &&
			(ev.ComputeInstance == NoInstance || d.ComputeInstance == ev.ComputeInstance)
	})
	if len(ofInstance) > 0 {
		return ofInstance
	}
	return m.of(ev.GPU)
}

// verdict is what an event means: by the administrator's rule or, without one, by the recovery action or, where the
// driver does not report that, by the catalogue.
func (m *Machine) verdict(now time.Time, o *occurrences, ev Event) Finding {
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
	switch f, ok := ev.Recovery.Finding(); {
	case ok:
		return Finding{Text: XIDName(ev.XID) + "; " + f.Text, Action: f.Action}
	case ev.Recovery == NoRecovery:
		return Finding{Text: XIDName(ev.XID), Action: actionOf(ev.XID)}
	default:
		return Finding{Action: None}
	}
}

// reaches adds an event and reports whether the rule's action takes place.
func (o *occurrences) reaches(now time.Time, r Rule) bool {
	count := min(max(r.Count, 1), MaxCount)
	o.recent = append(o.recent, now)
	if len(o.recent) > count {
		o.recent = slices.Delete(o.recent, 0, len(o.recent)-count)
	}
	return len(o.recent) == count && (count == 1 || now.Sub(o.recent[0]) <= r.Within)
}

// fault makes a device suspect or unhealthy, unless something worse is known of it.
func (e *entry) fault(now time.Time, f Finding, byEvent bool) {
	e.clean = time.Time{}
	to := Unhealthy
	if f.Action == Probe {
		to = Suspect
	}
	switch {
	case e.state == Unhealthy && !f.Action.worse(e.remedy):
		return
	case e.state == Suspect && to == Suspect:
		return
	}
	// A GPU that was just reset trains its links and joins the fabric anew.
	settling := f.Action == None && now.Sub(e.resetAt) < settlesWithin
	if e.state == Healthy && !settling {
		if now.Sub(e.recovered) > relapseWithin {
			e.relapses = 0
		}
		e.relapses++
	}
	if e.state != to {
		e.since = now
	}
	e.state, e.reason, e.remedy, e.reset = to, f.Text, f.Action, false
	e.byEvent, e.byRule = byEvent && to == Unhealthy, f.byRule && to == Unhealthy
}

// probed takes the result of a probe and returns the transitions of the GPU and its MIG devices.
func (m *Machine) probed(now time.Time, p probes) []Transition {
	findings := p.findings
	if f, ok := p.recovery.Finding(); ok {
		findings = append(slices.Clone(findings), f)
	}
	var worst *Finding
	for i := range findings {
		if worst == nil || findings[i].Action.worse(worst.Action) {
			worst = &findings[i]
		}
	}
	var transitions []Transition
	for _, e := range m.of(p.gpu) {
		before := e.condition()
		if e.lost && !p.lost {
			e.reset = true
		}
		e.lost = p.lost
		if worst != nil {
			e.failed(now, *worst)
		} else {
			e.passed(now, p.recovery, m.rules.CleanFor)
		}
		transitions = e.changed(before, transitions)
	}
	return transitions
}

// failed takes a finding. One that is the latest reason for the state replaces it also by a less severe one: it was
// found now.
func (e *entry) failed(now time.Time, f Finding) {
	if e.state == Unhealthy && !e.byEvent {
		e.clean, e.reason, e.remedy, e.reset = time.Time{}, f.Text, f.Action, false
		return
	}
	e.fault(now, f, false)
}

// passed takes clean probes. They prove a device healthy unless an event asked for more: then the device must have been
// reset or, but for a rule of the administrator, the driver must report that no recovery action is needed.
func (e *entry) passed(now time.Time, r Recovery, cleanFor time.Duration) {
	if e.state == Healthy || e.state == Unhealthy && e.byEvent && !e.reset && (r != 0 || e.byRule) {
		return
	}
	if e.clean.IsZero() {
		e.clean = now
	}
	if e.state != Recovering {
		e.state, e.since, e.byEvent, e.byRule = Recovering, now, false, false
	}
	wait := cleanFor << min(max(e.relapses-1, 0), maxDoublings)
	if now.Sub(e.clean) >= wait {
		e.state, e.reason, e.remedy, e.since, e.recovered = Healthy, "", None, now, now
	}
}

// WasReset tells the machine that a GPU was reset. Clean probes then make it healthy, unless it needs more than that.
func (m *Machine) WasReset(now time.Time, gpu string) {
	for _, e := range m.of(gpu) {
		e.resetAt, e.relapses = now, 0
		e.reset = e.reset || !e.remedy.worse(Reset)
	}
}

// Suspect makes a device suspect until its probes are clean.
func (m *Machine) Suspect(now time.Time, uuid, reason string) []Transition {
	e := m.entries[uuid]
	if e == nil {
		return nil
	}
	before := e.condition()
	e.fault(now, Finding{Text: reason, Action: Probe}, false)
	return e.changed(before, nil)
}

// Cordon takes a device out of service, and with a GPU its MIG devices, until Uncordon. It reports whether the device is
// there.
func (m *Machine) Cordon(now time.Time, uuid, reason string) ([]Transition, bool) {
	return m.setCordon(now, uuid, cmp.Or(reason, "no reason was given"))
}

// Uncordon ends Cordon.
func (m *Machine) Uncordon(now time.Time, uuid string) ([]Transition, bool) {
	return m.setCordon(now, uuid, "")
}

func (m *Machine) setCordon(now time.Time, uuid, reason string) ([]Transition, bool) {
	return m.setWithMIG(uuid, func(e *entry) { e.cordon, e.cordonSince = reason, now })
}

// HoldForReset takes a GPU and its MIG devices out of service until EndHold. This is apart from a cordon, which neither
// sets nor lifts it. It reports whether the GPU is there.
func (m *Machine) HoldForReset(now time.Time, gpu string) ([]Transition, bool) {
	return m.setWithMIG(gpu, func(e *entry) { e.heldSince = now })
}

// EndHold ends HoldForReset.
func (m *Machine) EndHold(gpu string) []Transition {
	transitions, _ := m.setWithMIG(gpu, func(e *entry) { e.heldSince = time.Time{} })
	return transitions
}

// Held lists the UUIDs of the GPUs that are held back for a reset.
func (m *Machine) Held() []string {
	gpus := map[string]bool{}
	for _, e := range m.entries {
		if !e.heldSince.IsZero() {
			gpus[e.device.GPU] = true
		}
	}
	return slices.Sorted(maps.Keys(gpus))
}

// setWithMIG changes a device and, with a GPU, its MIG devices: also those that are not there now and may come back. It
// reports whether any of them is there.
func (m *Machine) setWithMIG(uuid string, set func(*entry)) (transitions []Transition, present bool) {
	for _, id := range slices.Sorted(maps.Keys(m.entries)) {
		e := m.entries[id]
		if id != uuid && e.device.GPU != uuid {
			continue
		}
		before := e.condition()
		set(e)
		if e.present {
			transitions = e.changed(before, transitions)
			present = true
		}
	}
	return transitions, present
}

// Statuses are those of the devices that are there, by UUID.
func (m *Machine) Statuses() map[string]Status {
	all := map[string]Status{}
	for uuid, e := range m.entries {
		if e.present {
			all[uuid] = e.status()
		}
	}
	return all
}

// Beneath is the status of a device without regard to a cordon or HoldForReset, and false for one that is not there.
func (m *Machine) Beneath(uuid string) (Status, bool) {
	e := m.entries[uuid]
	if e == nil || !e.present {
		return Status{}, false
	}
	s := e.status()
	s.State, s.Reason, s.Since = e.state, e.reason, e.since
	return s, true
}

// Settled reports whether frequent probes would change nothing: each device is healthy, cordoned, or waits for a reboot
// or a person.
func (m *Machine) Settled() bool {
	for _, e := range m.entries {
		waits := e.condition().state == Cordoned || e.state == Unhealthy && e.byEvent && e.remedy.worse(Reset)
		if e.present && e.state != Healthy && !waits {
			return false
		}
	}
	return true
}

func (e *entry) status() Status {
	c := e.condition()
	s := Status{UUID: e.device.UUID, State: c.state, Reason: c.reason, Remedy: e.remedy, Since: e.since}
	switch {
	case e.cordon != "":
		s.Since = e.cordonSince
	case c.state == Cordoned:
		s.Since = e.heldSince
	}
	if len(e.codes) > 0 {
		s.XIDs = map[uint64]int{}
		for code, o := range e.codes {
			s.XIDs[code] = o.count
		}
	}
	return s
}

// String describes the state as the rest of a sentence about the device, such as "unhealthy: XID 95 (uncontained ECC
// error); it needs a reset".
func (s Status) String() string {
	switch s.State {
	case Healthy:
		return string(Healthy)
	case Cordoned:
		return s.Reason
	case Recovering:
		return "recovering: its probes pass; the fault was: " + s.Reason
	}
	text := string(s.State) + ": " + s.Reason
	needs := map[Action]string{Reset: "a reset", Reboot: "a reboot of the node", Service: "service"}
	if n := needs[s.Remedy]; n != "" {
		text += "; it needs " + n
	}
	return text
}

// condition is what a device's transitions are about.
type condition struct {
	state  State
	reason string
}

func (e *entry) condition() condition {
	switch {
	case e.cordon != "":
		return condition{Cordoned, "cordoned: " + e.cordon}
	case !e.heldSince.IsZero():
		return condition{Cordoned, "cordoned: an administrator resets it"}
	}
	return condition{e.state, e.reason}
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
		if e := m.entries[uuid]; e.present && wanted(&e.device) {
			list = append(list, e)
		}
	}
	return list
}
