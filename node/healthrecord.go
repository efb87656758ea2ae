package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/kernel"
	"gpu-cdi-plugin/internal/regular"
)

// MaxHealthRecord is the size in bytes of the largest record that is read.
const MaxHealthRecord = 4 << 20

// readRecord takes the record of the process before.
func (m *monitor) readRecord() {
	data, err := regular.ReadFile(m.Path, MaxHealthRecord)
	if err == nil {
		err = m.machine.Restore(data, m.identity)
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		m.recorded = data
		m.endRecordedHolds()
		return
	}
	aside := m.Path + ".damaged"
	m.log.Error("the recorded health of the devices cannot be used; all devices start as healthy: "+err.Error(),
		"set aside as", aside)
	if err := os.Rename(m.Path, aside); err != nil {
		m.log.Error("the recorded health of the devices cannot be set aside: " + err.Error())
	}
}

// endRecordedHolds brings the GPUs back that the process before held back for a reset, which it did not end.
func (m *monitor) endRecordedHolds() {
	for _, gpuUUID := range m.machine.Held() {
		m.machine.EndHold(gpuUUID)
		m.moved = true
		m.log.Warn(gpuUUID + " is no longer cordoned for a reset: this program ended before the reset, which is not repeated")
	}
}

func (m *monitor) hasMoved() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.moved
}

// record writes the record, and logs why it cannot be written.
func (m *monitor) record() {
	err := m.write()
	m.writing.Lock()
	defer m.writing.Unlock()
	switch {
	case err == nil:
		m.unwritten = ""
	case err.Error() != m.unwritten:
		m.unwritten = err.Error()
		m.log.Error(m.unwritten)
	}
}

// write writes the record, if it differs from the last one. What waits for the disk does not hold mu.
func (m *monitor) write() error {
	m.writing.Lock()
	defer m.writing.Unlock()
	m.mu.Lock()
	data, err := m.machine.Record(m.identity)
	restored := m.restored
	m.moved = false
	m.mu.Unlock()
	if m.Path == "" || !restored {
		return nil
	}
	if err == nil && !slices.Equal(data, m.recorded) {
		err = atomicfile.Write(m.Path, data, recordMode)
	}
	if err != nil {
		return fmt.Errorf("the health of the devices is not recorded for the next start: %w", err)
	}
	m.recorded = data
	return nil
}

// EditHealthRecord changes the record of the devices' health while no Reconciler uses it. Both directories are those of
// the Reconciler's options. The error wraps lock.ErrHeld if there is one. Edit gets no data where there is no record.
func EditHealthRecord(descriptorDir, path string, edit func(data []byte) ([]byte, error)) error {
	l := newDescriptors(descriptorDir).lock
	l.wrap = func(err error) error { return fmt.Errorf("edit the recorded health of the devices: %w", err) }
	if err := l.hold(); err != nil {
		return err
	}
	data, err := regular.ReadFile(path, MaxHealthRecord)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil {
		data, err = edit(data)
	}
	if err == nil {
		err = atomicfile.Write(path, data, recordMode)
	}
	return errors.Join(err, l.release())
}

// recordMode lets every user read the record: `devices` shows it.
const recordMode = 0o644

// HealthIdentity is what a record of the health of a host's devices is compared with.
func HealthIdentity(h host.Host, driverVersion string) health.Identity {
	return health.Identity{Boot: kernel.Read(h.Proc("sys", "kernel", "random", "boot_id")), Driver: driverVersion}
}
