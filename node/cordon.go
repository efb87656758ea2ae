package node

import (
	"errors"
	"time"

	"gpu-cdi-plugin/health"
)

// cordon sets or lifts a cordon. The record has it when cordon returns.
func (m *monitor) cordon(uuid string, set func(*health.Machine) ([]health.Transition, bool)) error {
	if err := m.change(uuid, set); err != nil {
		return err
	}
	return m.save()
}

// holdForReset takes a GPU out of service for a reset. It is recorded for people who read that; the next process ends
// it.
func (m *monitor) holdForReset(gpuUUID string) error {
	err := m.change(gpuUUID, func(machine *health.Machine) ([]health.Transition, bool) {
		return machine.HoldForReset(time.Now(), gpuUUID)
	})
	if err == nil {
		m.saveOrLog()
	}
	return err
}

func (m *monitor) endHold(gpuUUID string) {
	_ = m.change(gpuUUID, func(machine *health.Machine) ([]health.Transition, bool) {
		return machine.EndHold(gpuUUID), true
	})
	m.saveOrLog()
}

// change changes the machine and reports what follows.
func (m *monitor) change(uuid string, change func(*health.Machine) ([]health.Transition, bool)) error {
	m.mu.Lock()
	transitions, present := change(m.machine)
	m.mu.Unlock()
	m.report(transitions)
	if !present {
		return errors.New("the driver does not have " + uuid)
	}
	return nil
}
