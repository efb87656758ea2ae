package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/regular"
)

// cordon sets a cordon or, without a reason, lifts it. The record has it when cordon returns.
func (m *monitor) cordon(uuid, reason string) error {
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

// cordonRecorded does what cordon does in the record that is not loaded yet, as without a driver. Once it is loaded
// nothing is done.
func (m *monitor) cordonRecorded(uuid, reason string) (loaded bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock() // nothing else needs it yet
	if m.loaded {
		return true, nil
	}
	data, err := regular.ReadFile(m.Path, MaxHealthRecord)
	if err == nil {
		data, err = health.EditCordon(data, health.Identity{}, time.Now(), health.Device{UUID: uuid}, reason)
	}
	if err == nil {
		err = atomicfile.Write(m.Path, data, recordMode)
	}
	if err != nil {
		return false, fmt.Errorf("edit the recorded health of the devices: %w", err)
	}
	return false, nil
}

// holdForReset takes a GPU out of service for a reset. It is recorded for people who read that; the next process ends
// it, when the reset has ended.
func (m *monitor) holdForReset(gpuUUID string) error {
	err := m.change(func(machine *health.Machine) ([]health.Transition, error) {
		if slices.Contains(m.heldByOldReset, gpuUUID) {
			return nil, errors.New(m.names[gpuUUID] + " is " + oldReset)
		}
		return machine.HoldForReset(time.Now(), gpuUUID, "held for a reset by an administrator")
	})
	if err == nil {
		m.saveOrLog()
	}
	return err
}

func (m *monitor) endHold(gpuUUID string) {
	_ = m.change(func(machine *health.Machine) ([]health.Transition, error) {
		return machine.EndHold(gpuUUID), nil
	})
	m.saveOrLog()
}

func (m *monitor) knows(uuid string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loaded {
		return m.machine.Knows(uuid)
	}
	data, err := regular.ReadFile(m.Path, MaxHealthRecord)
	if err != nil {
		return false
	}
	recorded, err := health.Recorded(data, health.Identity{})
	_, known := recorded[uuid]
	return err == nil && known
}

// change changes the machine and reports what follows.
func (m *monitor) change(change func(*health.Machine) ([]health.Transition, error)) error {
	m.mu.Lock()
	transitions, err := change(m.machine)
	m.mu.Unlock()
	m.report(transitions)
	return err
}
