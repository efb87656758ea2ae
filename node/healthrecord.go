package node

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// MaxHealthRecord bounds the record that is read, in bytes.
const MaxHealthRecord = 4 << 20

// loadRecord loads the record of the previous run, if there is one, and reports whether it can be used. It must be
// called when the names of the devices are known.
func (m *Monitor) loadRecord(driverVersion string) (usable bool) {
	m.loaded, m.identity = true, HealthIdentity(m.host, driverVersion)
	if m.opts.Path == "" {
		return true
	}
	defer m.takeOverHolds()
	err := m.restoreRecord()
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return true
	}
	aside := m.opts.Path + ".damaged"
	m.log.Error("the recorded health of the devices cannot be used; cordons are lost, and devices are suspect until "+
		"probes pass: "+err.Error(),
		"set aside as", aside)
	if err := os.Rename(m.opts.Path, aside); err != nil {
		m.log.Error("the recorded health of the devices cannot be set aside: " + err.Error())
	}
	return false
}

func (m *Monitor) restoreRecord() error {
	data, err := fileio.ReadFile(m.opts.Path, MaxHealthRecord)
	if err != nil {
		return err
	}
	if err := m.machine.Restore(data, m.identity); err != nil {
		return err
	}
	m.saved = data
	return nil
}

// oldReset is the reason of a hold if nvidia-smi, started by an earlier run, is still resetting the GPU.
const oldReset = "held for a reset that has not ended: nvidia-smi, which this program started before it was " +
	"restarted, still runs"

// takeOverHolds puts GPUs back into service that the previous run held for a reset when it ended, except those whose
// reset continues. If it is unknown which resets continue, all of them stay held until it is known.
func (m *Monitor) takeOverHolds() {
	if m.opts.StillResetting != nil {
		var err error
		m.heldReason = oldReset
		if m.heldByOldReset, err = m.opts.StillResetting(); err != nil {
			m.heldReason = "held, since its reset may not have ended: " + err.Error()
			m.heldByOldReset = slices.DeleteFunc(slices.Sorted(maps.Keys(m.names)), func(uuid string) bool {
				return !isGPU(m.names[uuid])
			})
		}
	}
	for _, gpuUUID := range m.machine.Held() {
		m.machine.EndHold(gpuUUID)
		m.unsaved = true
		if slices.Contains(m.heldByOldReset, gpuUUID) {
			continue
		}
		m.log.Warn(cmp.Or(m.names[gpuUUID], gpuUUID) + " is no longer held for a reset, during which this program " +
			"restarted: repeat the reset if it is still needed")
	}
}

// holdForOldResets holds the GPUs that a reset of an earlier run is still resetting. It does so once the GPUs are
// known.
func (m *Monitor) holdForOldResets() {
	for _, gpuUUID := range m.heldByOldReset {
		if slices.Contains(m.machine.Held(), gpuUUID) {
			continue
		}
		if _, err := m.machine.HoldForReset(time.Now(), gpuUUID, m.heldReason); err == nil {
			m.unsaved = true
			m.log.Warn(cmp.Or(m.names[gpuUUID], gpuUUID) + " is " + m.heldReason)
		}
	}
}

// endedOldResets returns the GPUs that are held for a reset of an earlier run which has ended.
func (m *Monitor) endedOldResets() []string {
	m.mu.Lock()
	held := slices.Clone(m.heldByOldReset)
	m.mu.Unlock()
	if len(held) == 0 {
		return nil
	}
	running, err := m.opts.StillResetting()
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(held, func(uuid string) bool { return slices.Contains(running, uuid) })
}

// endOldResets ends the holds of these GPUs, whose resets by an earlier run have ended.
func (m *Monitor) endOldResets(gpuUUIDs []string) {
	for _, gpuUUID := range gpuUUIDs {
		m.mu.Lock()
		m.heldByOldReset = slices.DeleteFunc(m.heldByOldReset, func(uuid string) bool { return uuid == gpuUUID })
		name := cmp.Or(m.names[gpuUUID], gpuUUID)
		m.mu.Unlock()
		m.log.Warn(name + " is no longer held: the nvidia-smi that was resetting it has " +
			"ended, with an unknown result. If the GPU stays unhealthy, reset it again. If its persistence mode was " +
			"on, switch it on again: nvidia-smi -i " + gpuUUID + " -pm 1")
		m.EndHold(gpuUUID)
	}
}

// worthSaving reports whether a transition is saved at once. A transition to or from Recovering is not, unless the
// device is healthy afterwards: an intermittent fault would cause a write each time.
func worthSaving(t *health.Transition) bool {
	return t.To.State == health.Healthy || t.From != health.Recovering && t.To.State != health.Recovering
}

func (m *Monitor) hasUnsaved() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unsaved
}

// saveOrRemark writes the record. An error is a remark of the state until the record is written.
func (m *Monitor) saveOrRemark() {
	text := ""
	if err := m.save(); err != nil && !errors.Is(err, errUnlocked) {
		text = err.Error()
	}
	m.mu.Lock()
	changed := text != m.saveError
	m.saveError = text
	m.mu.Unlock()
	if changed {
		m.changed()
	}
}

// errUnlocked means that the record is not written any more, since another instance may write it.
var errUnlocked = errors.New("another instance has taken over: try again")

// setUnlocked waits for a save, and sets whether later ones return errUnlocked.
func (m *Monitor) setUnlocked(unlocked bool) {
	m.saving.Lock()
	defer m.saving.Unlock()
	m.unlocked = unlocked
}

// save writes the record if it has changed. While it waits for the disk, it does not hold mu. After Unlock it returns
// errUnlocked.
func (m *Monitor) save() error {
	m.saving.Lock()
	defer m.saving.Unlock()
	if m.unlocked && m.opts.Path != "" {
		return errUnlocked
	}
	m.mu.Lock()
	data, err := m.machine.Record(m.identity)
	loaded := m.loaded
	m.unsaved = false
	m.mu.Unlock()
	if m.opts.Path == "" || !loaded {
		return nil
	}
	if err == nil && !slices.Equal(data, m.saved) {
		err = fileio.Replace(m.opts.Path, data, recordMode)
	}
	if err != nil {
		m.mu.Lock()
		m.unsaved = true // until the next probe tries again
		m.mu.Unlock()
		return fmt.Errorf("the health of the devices is not recorded for the next start: %w", err)
	}
	m.saved = data
	return nil
}

// EditHealthRecord changes the health record at path while no Reconciler uses it. The function `edit` gets the record,
// or nil if there is none, and returns the new one. The parameters descriptorDir and path are those of the
// Reconciler's options. If a Reconciler uses one of them, the error wraps fileio.ErrHeld.
func EditHealthRecord(descriptorDir, path string, edit func(data []byte) ([]byte, error)) error {
	l := newDescriptors(descriptorDir).lock
	l.wrap = func(err error) error { return fmt.Errorf("edit the recorded health of the devices: %w", err) }
	if err := l.hold(); err != nil {
		return err
	}
	return errors.Join(editRecord(path, edit), l.release())
}

func editRecord(path string, edit func(data []byte) ([]byte, error)) error {
	data, err := fileio.ReadFile(path, MaxHealthRecord)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if data, err = edit(data); err != nil {
		return err
	}
	return fileio.Replace(path, data, recordMode)
}

// recordMode lets every user read the record: the verb `devices` prints it.
const recordMode = 0o644

// HealthIdentity returns the boot and the driver of this host, to be compared with those of a health record.
func HealthIdentity(h host.Host, driverVersion string) health.Identity {
	return health.Identity{Boot: host.ReadLine(h.Proc("sys", "kernel", "random", "boot_id")), Driver: driverVersion}
}
