package health

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

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
	return m.setWithMIG(uuid, func(e *entry) { e.Cordon, e.CordonSince = reason, now })
}

// HoldForReset takes a GPU and its MIG devices out of service until EndHold. This is apart from a cordon, which neither
// sets nor lifts it. It reports whether the GPU is there.
func (m *Machine) HoldForReset(now time.Time, gpu string) ([]Transition, bool) {
	return m.setWithMIG(gpu, func(e *entry) { e.HeldSince = now })
}

// EndHold ends HoldForReset.
func (m *Machine) EndHold(gpu string) []Transition {
	transitions, _ := m.setWithMIG(gpu, func(e *entry) { e.HeldSince = time.Time{} })
	return transitions
}

// Held lists the UUIDs of the GPUs that are held for a reset, also of those that are not there.
func (m *Machine) Held() []string {
	gpus := map[string]bool{}
	for _, e := range m.entries {
		if !e.HeldSince.IsZero() {
			gpus[e.GPU] = true
		}
	}
	return slices.Sorted(maps.Keys(gpus))
}

// setWithMIG changes a device and, with a GPU, its MIG devices: also those that are not there now and may come back. It
// reports whether any of them is there.
func (m *Machine) setWithMIG(uuid string, set func(*entry)) (transitions []Transition, present bool) {
	for _, id := range slices.Sorted(maps.Keys(m.entries)) {
		e := m.entries[id]
		if id != uuid && e.GPU != uuid {
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
