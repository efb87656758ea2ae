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

// Cordon takes a device out of service for a reason, until Uncordon. If the device is a GPU, its MIG devices are out
// of service too. The device must be known (see Knows). When Cordon returns, the state is published and recorded;
// after an error the cordon may not survive a restart.
func (m *Monitor) Cordon(uuid, reason string) error {
	return m.cordon(uuid, cmp.Or(reason, "no reason was given"))
}

// Uncordon ends a cordon. For a MIG device whose GPU is cordoned it returns an error: the GPU must be uncordoned
// instead.
func (m *Monitor) Uncordon(uuid string) error { return m.cordon(uuid, "") }

// cordon cordons a device or, if the reason is empty, ends its cordon.
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
	if err := m.save(); errors.Is(err, errUnlocked) {
		return err
	} else if err != nil {
		return fmt.Errorf("the change is in effect, but a restart would undo it: %w", err)
	}
	return nil
}

// cordonRecorded changes a cordon in a health record that is not loaded yet, for example because there is no driver.
// If the record is loaded, it does nothing.
func (m *Monitor) cordonRecorded(uuid, reason string) (loaded bool, err error) {
	m.saving.Lock()
	defer m.saving.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock() // held meanwhile: no other method needs the record before it is loaded
	if m.loaded {
		return true, nil
	}
	if m.unlocked {
		return false, errUnlocked
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

// HoldForReset takes a GPU and its MIG devices out of service until EndHold, independently of a cordon. The reason is
// part of a sentence. When HoldForReset returns, the state is published. The hold is also in the health record, for
// people; the next process ends the hold when the reset has ended.
func (m *Monitor) HoldForReset(gpuUUID, reason string) error {
	err := m.change(func(machine *health.Machine) ([]health.Transition, error) {
		if slices.Contains(m.heldByOldReset, gpuUUID) {
			return nil, errors.New(m.names[gpuUUID] + " is " + oldReset)
		}
		return machine.HoldForReset(time.Now(), gpuUUID, reason)
	})
	if err != nil {
		return err
	}
	m.saveOrRemark()
	return nil
}

// EndHold ends a hold of HoldForReset.
func (m *Monitor) EndHold(gpuUUID string) {
	_ = m.change(func(machine *health.Machine) ([]health.Transition, error) {
		return machine.EndHold(gpuUUID), nil
	})
	m.saveOrRemark()
}

// Knows reports whether a device can be cordoned: it is present, or it was present and is remembered. The health
// record counts too, before there is a driver.
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

// change changes the health of devices and reports the resulting transitions.
func (m *Monitor) change(change func(*health.Machine) ([]health.Transition, error)) error {
	m.mu.Lock()
	transitions, err := change(m.machine)
	m.mu.Unlock()
	m.report(transitions)
	return err
}
