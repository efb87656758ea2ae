package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/health"
)

// cordon sets or lifts a cordon. The record has it when cordon returns.
func (m *monitor) cordon(set func(*health.Machine) ([]health.Transition, error)) error {
	if err := m.change(set); err != nil {
		return err
	}
	if err := m.save(); err != nil {
		return fmt.Errorf("it is done, but would not survive a restart now: %w", err)
	}
	return nil
}

// holdForReset takes a GPU out of service for a reset. It is recorded for people who read that; the next process ends
// it, when the reset has ended.
func (m *monitor) holdForReset(gpuUUID string) error {
	err := m.change(func(machine *health.Machine) ([]health.Transition, error) {
		if slices.Contains(m.earlier, gpuUUID) {
			return nil, errors.New(m.names[gpuUUID] + " is " + earlierReset)
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
	return m.machine.Knows(uuid)
}

// change changes the machine and reports what follows.
func (m *monitor) change(change func(*health.Machine) ([]health.Transition, error)) error {
	m.mu.Lock()
	transitions, err := change(m.machine)
	m.mu.Unlock()
	m.report(transitions)
	return err
}
