package health

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

// Identity is the boot and the driver with which a record was made.
type Identity struct {
	// Boot is the kernel's boot ID, and Driver the driver's version.
	Boot   string `json:"boot"`
	Driver string `json:"driver"`
}

const recordVersion = 1

// Recorded returns the states of a record, by UUID, as Restore would set them.
func Recorded(data []byte, now Identity) (map[string]Status, error) {
	m := New(Rules{})
	r, err := m.restore(data, now)
	if err != nil {
		return nil, err
	}
	m.eventsMissed = r.EventsMissed
	all := map[string]Status{}
	for uuid, e := range m.entries {
		all[uuid] = m.status(e)
	}
	return all, nil
}

// record is the JSON form of a machine's state.
type record struct {
	Version int `json:"version"`
	Identity
	Devices []recordedDevice `json:"devices"`
	// Baselines has, by UUID, the state with which the next probe of a GPU is compared.
	Baselines map[string]*baseline `json:"baselines,omitempty"`
	// EventsMissed says why the events of GPUs are not received, by UUID. It is only for people who read the record;
	// the next process determines it again.
	EventsMissed map[string]string `json:"eventsMissed,omitempty"`
}

// recordedDevice is a device of a record.
type recordedDevice struct {
	recordedState
	XIDs map[uint64]int `json:"xids,omitempty"` // number of events of each code
}

// recordedState is the part of a device's state that outlives the process.
type recordedState struct {
	Device
	Seen time.Time `json:"seen"` // the last day it was present: a time would change the record each minute

	State  State     `json:"state"` // the state apart from a cordon
	Reason string    `json:"reason,omitempty"`
	Remedy Action    `json:"remedy,omitempty"`
	Since  time.Time `json:"since"`
	// Event is what the device needs because of events, and Rule what it needs because of an administrator's rule;
	// zero if that is nothing. Clean probes clear neither. A probe clears Event if the driver reports that no recovery
	// action is needed.
	Event Finding `json:"event,omitzero"`
	Rule  Finding `json:"rule,omitzero"`
	Lost  bool    `json:"lost,omitempty"` // whether the last probe reported the GPU as lost

	Cordon      string    `json:"cordon,omitempty"` // why an administrator cordoned it, or empty
	CordonSince time.Time `json:"cordonSince,omitzero"`
	Hold        string    `json:"hold,omitempty"`        // why it is held for a reset of its GPU
	HeldSince   time.Time `json:"heldSince,omitzero"`    // since when it is held; zero if it is not
	CannotReset string    `json:"cannotReset,omitempty"` // why resets of the GPU are refused; empty if unknown

	// InUse says what uses the device although no container holds it, or is empty.
	InUse      string    `json:"dirty,omitempty"`
	InUseSince time.Time `json:"dirtySince,omitzero"`

	Relapses  int       `json:"relapses,omitempty"`
	Recovered time.Time `json:"recovered,omitzero"` // when it last became healthy
}

// Record returns the machine's state as JSON, for Restore.
func (m *Machine) Record(id Identity) ([]byte, error) {
	r := record{
		Version: recordVersion, Identity: id, Devices: []recordedDevice{}, Baselines: m.baselines,
		EventsMissed: m.eventsMissed,
	}
	for _, uuid := range slices.Sorted(maps.Keys(m.entries)) {
		e := m.entries[uuid]
		r.Devices = append(r.Devices, recordedDevice{e.recordedState, e.status().XIDs})
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("record the health of the devices: %w", err)
	}
	return append(data, '\n'), nil
}

func parseRecord(data []byte) (record, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, err
	}
	if r.Version != recordVersion {
		return record{}, fmt.Errorf("unknown version %d", r.Version)
	}
	return r, nil
}

// EditCordon returns a record with the cordon of a device. If the reason is empty, the cordon is ended, like by
// Uncordon. If the device is a GPU, the same is done for its MIG devices. Holds of HoldForReset stay; the next process
// ends them. If the device is not in the record, it is added as healthy, or with the state of its GPU. If data is nil,
// the result is a new record with that identity.
func EditCordon(data []byte, id Identity, now time.Time, d Device, reason string) ([]byte, error) {
	m := New(Rules{})
	if len(data) > 0 {
		r, err := parseRecord(data)
		if err != nil {
			return nil, fmt.Errorf("read the recorded health of the devices: %w", err)
		}
		id = r.Identity
		if err := m.Restore(data, id); err != nil {
			return nil, err
		}
	}
	if m.entries[d.UUID] == nil {
		e := m.created(now, d)
		e.Device, e.Seen = d, now
		m.entries[d.UUID] = e
	}
	var err error
	if reason == "" {
		_, err = m.Uncordon(now, d.UUID)
	} else {
		_, err = m.Cordon(now, d.UUID, reason)
	}
	if err != nil {
		return nil, err
	}
	return m.Record(id)
}

// Restore sets the state of a new machine to a recorded one, as far as the record is still valid:
//
//   - A cordon stays until it is lifted, and HoldForReset until EndHold: it is unknown whether a reset of the
//     previous process continues. InUse stays until a check finds nothing.
//   - With the same boot and driver, a device has its recorded state. A recovering device begins to recover again.
//   - After a reboot, or with another driver, the remedy may have been applied: devices that were not healthy are
//     suspect, and probes decide. NVLinks that were up are still expected to be up. A GPU that could not be reset
//     may be resettable now.
//
// An absent device is remembered by its UUID, which is unique. After an error the machine is unchanged.
func (m *Machine) Restore(data []byte, now Identity) error {
	_, err := m.restore(data, now)
	return err
}

func (m *Machine) restore(data []byte, now Identity) (record, error) {
	r, err := parseRecord(data)
	if err != nil {
		return r, fmt.Errorf("restore the health of the devices: %w", err)
	}
	entries := map[string]*entry{}
	for _, d := range r.Devices {
		if d.UUID == "" || !slices.Contains([]State{Healthy, Suspect, Unhealthy, Recovering}, d.State) {
			return r, fmt.Errorf("restore the health of the devices: device %q has state %q", d.UUID, d.State)
		}
		e := &entry{recordedState: d.recordedState, codes: map[uint64]*occurrences{}}
		if r.Identity != now && e.State != Healthy {
			e.State, e.Remedy, e.Event, e.Rule, e.Lost = Suspect, Probe, Finding{}, Finding{}, false
		}
		if r.Identity != now {
			e.CannotReset = ""
		}
		for code, n := range d.XIDs {
			if len(e.codes) < maxCodes {
				e.codes[code] = &occurrences{count: n}
			}
		}
		entries[d.UUID] = e
	}
	m.entries = entries
	for uuid, b := range r.Baselines {
		if b == nil {
			continue
		}
		if r.Identity != now {
			b.UncorrectedECC = math.MaxUint64 // the count begins at 0
		}
		m.baselines[uuid] = b
	}
	return r, nil
}
