package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Cordon takes a device out of service until Uncordon. If the device is a GPU, its MIG devices are out of service too.
// The device must be known, but need not be present.
func (m *Machine) Cordon(now time.Time, uuid, reason string) ([]Transition, error) {
	return m.setCordon(now, uuid, cmp.Or(reason, "no reason was given"))
}

// Uncordon ends a cordon. For a MIG device whose GPU is cordoned it returns an error. If NVLinks of a GPU are down
// when its cordon ends, that is no fault from then on: the administrator who cordoned the GPU knows of them.
func (m *Machine) Uncordon(now time.Time, uuid string) ([]Transition, error) {
	if e := m.entries[uuid]; e != nil && e.GPU != uuid {
		if parent := m.entries[e.GPU]; parent != nil && parent.Cordon != "" {
			return nil, fmt.Errorf("%s is a part of GPU %s, which is cordoned: uncordon the GPU", uuid, e.GPU)
		}
	}
	if b := m.baselines[uuid]; b != nil && m.entries[uuid] != nil && m.entries[uuid].Cordon != "" {
		b.NVLinks = 0
	}
	return m.setCordon(now, uuid, "")
}

func (m *Machine) setCordon(now time.Time, uuid, reason string) ([]Transition, error) {
	return m.setWithMIG(uuid, func(e *entry) { e.Cordon, e.CordonSince = reason, now })
}

// Knows reports whether a device is present, or was present and is remembered.
func (m *Machine) Knows(uuid string) bool { return m.entries[uuid] != nil }

// HoldForReset takes a GPU and its MIG devices out of service for a reset, until EndHold. The reason is part of a
// sentence. A hold is independent of a cordon. The GPU must be known, but need not be present.
func (m *Machine) HoldForReset(now time.Time, gpu, reason string) ([]Transition, error) {
	return m.setWithMIG(gpu, func(e *entry) { e.Hold, e.HeldSince = reason, now })
}

// EndHold ends a hold of HoldForReset.
func (m *Machine) EndHold(gpu string) []Transition {
	transitions, _ := m.setWithMIG(gpu, func(e *entry) { e.Hold, e.HeldSince = "", time.Time{} })
	return transitions
}

// Held returns the UUIDs of the GPUs that are held for a reset, present or not.
func (m *Machine) Held() []string {
	gpus := map[string]bool{}
	for _, e := range m.entries {
		if !e.HeldSince.IsZero() {
			gpus[e.GPU] = true
		}
	}
	return slices.Sorted(maps.Keys(gpus))
}

// setWithMIG changes a device. If the device is a GPU, it also changes the GPU's MIG devices, including absent ones
// that may come back. It returns an error if none of them is known.
func (m *Machine) setWithMIG(uuid string, set func(*entry)) ([]Transition, error) {
	var transitions []Transition
	known := false
	for _, id := range slices.Sorted(maps.Keys(m.entries)) {
		e := m.entries[id]
		if id != uuid && e.GPU != uuid {
			continue
		}
		known = true
		before := e.condition()
		set(e)
		if e.present {
			transitions = e.changed(before, transitions)
		}
	}
	if !known {
		return nil, fmt.Errorf("no device %s is known", uuid)
	}
	return transitions, nil
}
