package node

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/fileio"
)

// Cordon takes a known device (see Knows) out of service for a reason, and with a GPU its MIG devices, until Uncordon.
// When it returns, the state is published and recorded; after an error the cordon may not survive a restart.
func (m *Monitor) Cordon(uuid, reason string) error {
	return m.cordon(uuid, cmp.Or(reason, "no reason was given"))
}

// Uncordon ends Cordon. It returns an error for a MIG device of a GPU that is cordoned.
func (m *Monitor) Uncordon(uuid string) error { return m.cordon(uuid, "") }

// cordon sets a cordon or, without a reason, lifts it.
func (m *Monitor) cordon(uuid, reason string) error {
	if loaded, err := m.cordonRecorded(uuid, reason); !loaded {
		return err
	}
	err := m.change(func(machine *health.Machine) ([]health.Transition, error) {
		if reason == "" {
			return machine.Uncordon(time.Now(), uuid)
		}
		return machine.Cordon(time.Now(), uuid, reason)
	})
	if err != nil {
		return err
	}
	if err := m.save(); err != nil {
		return fmt.Errorf("the change is in effect, but a restart would undo it: %w", err)
	}
	return nil
}

// cordonRecorded changes a cordon in a record that is not loaded yet, for example without a driver. If the record is
// already loaded, it does nothing.
func (m *Monitor) cordonRecorded(uuid, reason string) (loaded bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock() // only this needs the record before it is loaded
	if m.loaded {
		return true, nil
	}
	if err := m.editCordon(uuid, reason); err != nil {
		return false, fmt.Errorf("edit the recorded health of the devices: %w", err)
	}
	return false, nil
}

func (m *Monitor) editCordon(uuid, reason string) error {
	data, err := fileio.ReadFile(m.opts.Path, MaxHealthRecord)
	if err != nil {
		return err
	}
	data, err = health.EditCordon(data, health.Identity{}, time.Now(), health.Device{UUID: uuid}, reason)
	if err != nil {
		return err
	}
	return fileio.Replace(m.opts.Path, data, recordMode)
}

// HoldForReset takes a GPU and its MIG devices out of service until EndHold, independently of a cordon. When it
// returns, the state is published. The hold is recorded for people who read the record; the next process ends it when
// the reset has ended.
func (m *Monitor) HoldForReset(gpuUUID string) error {
	err := m.change(func(machine *health.Machine) ([]health.Transition, error) {
		if slices.Contains(m.heldByOldReset, gpuUUID) {
			return nil, errors.New(m.names[gpuUUID] + " is " + oldReset)
		}
		return machine.HoldForReset(time.Now(), gpuUUID, "held for a reset by an administrator")
	})
	if err != nil {
		return err
	}
	m.saveOrLog()
	return nil
}

// EndHold ends HoldForReset.
func (m *Monitor) EndHold(gpuUUID string) {
	_ = m.change(func(machine *health.Machine) ([]health.Transition, error) {
		return machine.EndHold(gpuUUID), nil
	})
	m.saveOrLog()
}

// Knows reports whether a device can be cordoned: it is present, or was present and is remembered, even before the
// driver is available.
func (m *Monitor) Knows(uuid string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loaded {
		return m.machine.Knows(uuid)
	}
	data, err := fileio.ReadFile(m.opts.Path, MaxHealthRecord)
	if err != nil {
		return false
	}
	recorded, err := health.Recorded(data, health.Identity{})
	_, known := recorded[uuid]
	return err == nil && known
}

// change changes the machine and reports the resulting transitions.
func (m *Monitor) change(change func(*health.Machine) ([]health.Transition, error)) error {
	m.mu.Lock()
	transitions, err := change(m.machine)
	m.mu.Unlock()
	m.report(transitions)
	return err
}
