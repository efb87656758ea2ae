package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// Prober reads the health of GPUs of the last snapshot from the driver: of the GPUs with the given UUIDs, or of all.
type Prober interface {
	Probes(ctx context.Context, uuids ...string) ([]gpu.Probe, error)
}

// HealthObserver is notified of changes in the health of devices, for metrics.
type HealthObserver interface {
	// Event notifies of each event of a GPU except gpu.EventSource.
	Event(gpu.Event)
	// EventSource notifies whether the events of a GPU are received.
	EventSource(gpuUUID string, received bool)
}

const (
	// maxLogged bounds the reasons that are remembered as logged for a device, in bytes. Otherwise they could grow for
	// ever: a program that restarts again and again has a new process ID each time.
	maxLogged = 4 << 10
	// maxGap is how long the driver's library may be closed before the missed events are logged. Most resets take
	// less.
	maxGap = 10 * time.Second
	// maxWaitingXIDs bounds the different XIDs that wait until their GPU is known. This takes milliseconds, or longer
	// while the driver's files cannot be used. A machine has at most 16 GPUs, and a GPU reports few codes.
	maxWaitingXIDs = 1024
	// saveInterval is how often counters are saved if no state changes.
	saveInterval = time.Minute
)

// HealthOptions configure the health monitoring of the devices.
type HealthOptions struct {
	Prober Prober
	Rules  health.Rules
	// Path is the file with the record of the devices' health for the next start; empty means none.
	Path string
	// StillResetting returns the UUIDs of the GPUs that an earlier run of this program began to reset and that are
	// still being reset. If it is nil, there are none.
	StillResetting func() ([]string, error)
	// Observer is notified of health changes; optional.
	Observer HealthObserver
}

// Monitor tracks the health of the devices. It handles the driver's events at once and probes the GPUs, and records
// the health for the next start. Each Monitor belongs to a Reconciler.
type Monitor struct {
	opts     HealthOptions
	log      *slog.Logger
	changed  func() // publishes the health
	host     host.Host
	probeNow wake.Chan

	mu             sync.Mutex
	machine        *health.Machine
	names          map[string]string // the devices' names for people, such as "GPU 3", by UUID
	waitingXIDs    []waitingXID      // of GPUs that setDevices has not installed yet
	loggedEvents   map[string]bool   // keys of the first event of each kind of a GPU
	closed         time.Time         // when the library was closed; zero if it is open
	loaded         bool              // whether the record was read; it is not written before
	identity       health.Identity   // of the record
	heldByOldReset []string          // UUIDs of the GPUs held for a reset of an earlier run
	heldReason     string            // why heldByOldReset are held
	unsaved        bool              // whether a transition that must be saved is not in the record yet
	saveError      string            // why the last record could not be written, or empty
	loggedReasons  map[string]string // the reasons that were logged for each device since it was healthy, by UUID

	saving   sync.Mutex // held while the record is written
	unlocked bool       // whether another instance may write the record
	saved    []byte     // the last record that was read or written
	saveDue  time.Time  // when counters are to be saved
}

// waitingXID is an XID event of a GPU that is not known yet, with the number of times that it occurred.
type waitingXID struct {
	gpu.Event
	count int
}

func newMonitor(h *HealthOptions, log *slog.Logger, host host.Host, changed func()) *Monitor {
	return &Monitor{
		opts: *h, log: log, changed: changed, host: host, probeNow: wake.New(),
		machine: health.New(h.Rules), loggedEvents: map[string]bool{}, loggedReasons: map[string]string{},
	}
}

// setDevices sets the devices to those of a snapshot, and handles XIDs that came before. On the first call it restores
// the recorded health.
func (m *Monitor) setDevices(s *gpu.Snapshot) {
	for _, e := range m.replaceDevices(s) {
		for range e.count {
			m.receiveXID(e.Event)
		}
	}
}

// replaceDevices sets the devices to those of a snapshot, and returns the XIDs that waited for them.
func (m *Monitor) replaceDevices(s *gpu.Snapshot) (xids []waitingXID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var devices []health.Device
	before := m.names
	devices, m.names = healthDevices(s)
	m.logChangedGPUs(before)
	var unreadable []string
	for i := range s.Devices {
		if d := &s.Devices[i]; !d.Usable() {
			unreadable = append(unreadable, d.UUID)
		}
	}
	usable := m.loaded || m.loadRecord(s.DriverVersion)
	m.machine.SetDevices(time.Now(), devices, unreadable...)
	m.holdForOldResets()
	if !usable {
		m.machine.SuspectAll(time.Now(), "its recorded health cannot be used")
	}
	xids, m.waitingXIDs = m.waitingXIDs, nil
	return slices.DeleteFunc(xids, func(e waitingXID) bool { return !m.machine.Knows(e.GPU) })
}

// logChangedGPUs logs which GPUs are gone and which are new. `before` has the devices' names in the previous snapshot.
func (m *Monitor) logChangedGPUs(before map[string]string) {
	for _, uuid := range slices.Sorted(maps.Keys(before)) {
		if name := before[uuid]; isGPU(name) && m.names[uuid] == "" {
			m.log.Warn(name + " is gone: the driver no longer reports " + uuid)
		}
	}
	for _, uuid := range slices.Sorted(maps.Keys(m.names)) {
		if name := m.names[uuid]; before != nil && isGPU(name) && before[uuid] == "" {
			m.log.Info(name + " is new: " + uuid)
		}
	}
}

// isGPU reports whether a device's name for people is that of a GPU.
func isGPU(name string) bool { return strings.HasPrefix(name, "GPU ") }

// healthDevices returns the devices of a snapshot, each GPU before its MIG devices. It also returns their names for
// people, by UUID.
func healthDevices(s *gpu.Snapshot) (devices []health.Device, names map[string]string) {
	names = map[string]string{}
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.UUID == "" {
			continue
		}
		names[d.UUID] = fmt.Sprintf("GPU %d", d.Index)
		devices = append(devices, health.Device{
			UUID: d.UUID, GPU: d.UUID, GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance,
		})
		for j := range d.MIG {
			mig := &d.MIG[j]
			names[mig.UUID] = fmt.Sprintf("MIG device %d:%d", d.Index, mig.Index)
			devices = append(devices, health.Device{
				UUID: mig.UUID, GPU: d.UUID, GPUInstance: mig.GPUInstance, ComputeInstance: mig.ComputeInstance,
			})
		}
	}
	return devices, names
}

// report logs transitions and publishes the resulting state.
func (m *Monitor) report(transitions []health.Transition) {
	if len(transitions) == 0 {
		return
	}
	m.changed()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, t := range transitions {
		m.unsaved = m.unsaved || worthSaving(&t)
		m.logTransition(&t)
	}
}

// logTransition logs a transition. An intermittent fault is logged only once until the device is healthy again.
func (m *Monitor) logTransition(t *health.Transition) {
	uuid, text := t.To.UUID, t.To.String()
	log := m.log.Warn
	switch t.To.State {
	case health.Healthy:
		delete(m.loggedReasons, uuid)
		text, log = "healthy again", m.log.Info
	case health.Recovering:
		log = m.log.Info
	}
	again := strings.Contains(m.loggedReasons[uuid], text+"\n") && t.To.State != health.Cordoned
	if again || t.To.Reason == health.NotAnswering { // another line, from the snapshot, says more
		return
	}
	if t.To.State != health.Healthy {
		if len(m.loggedReasons[uuid]) > maxLogged {
			m.loggedReasons[uuid] = ""
		}
		m.loggedReasons[uuid] += text + "\n"
	}
	log(m.names[uuid] + " is " + text)
}

// withHealth returns a state with the health of the devices.
func (m *Monitor) withHealth(s State) State {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.resourcesBefore, s.remarksBefore = s.Resources, s.remarks
	s.Health = m.machine.Statuses()
	s.Resources = resource.MarkUnhealthy(s.Resources, func(d *resource.Device) string {
		h, known := s.Health[d.UUID]
		if !known || h.State == health.Healthy {
			return ""
		}
		d.Fault, d.InUse = h.State != health.Cordoned, h.InUse // d is a copy
		return h.String()
	})
	s.remarks = slices.Clone(s.remarks)
	if m.saveError != "" {
		s.remarks = append(s.remarks, Remark{Key: "health record", Level: slog.LevelWarn, Text: m.saveError})
	}
	for _, uuid := range slices.Sorted(maps.Keys(s.Health)) {
		if why := s.Health[uuid].EventsMissed; why != "" {
			text := "events of " + m.names[uuid] + " are not received, and only probes notice its faults"
			r := newRemark("events of "+uuid, text, errors.New(why))
			r.Level = slog.LevelWarn
			s.remarks = append(s.remarks, r)
		}
	}
	return s
}

// poll probes the GPUs and saves their health. It returns the probes, or none as long as the driver does not answer.
func (m *Monitor) poll(ctx context.Context) []gpu.Probe {
	if m.hasUnsaved() { // from an event; the driver may take long to answer the probe
		m.saveOrRemark()
	}
	ended := m.endedOldResets()
	probes, _ := m.probe(ctx)
	m.endOldResets(ended)
	if m.hasUnsaved() || time.Now().After(m.saveDue) {
		m.saveOrRemark()
		m.saveDue = time.Now().Add(saveInterval)
	}
	return probes
}

// probe probes the GPUs with these UUIDs, or all of them.
func (m *Monitor) probe(ctx context.Context, uuids ...string) ([]gpu.Probe, error) {
	probes, err := m.opts.Prober.Probes(ctx, uuids...)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("probe the GPUs: %w", err)
	}
	var transitions []health.Transition
	m.mu.Lock()
	for i := range probes {
		transitions = append(transitions, m.machine.Probe(time.Now(), &probes[i])...)
	}
	m.mu.Unlock()
	m.report(transitions)
	return probes, nil
}

// Check probes a GPU and returns why a device of that GPU is not healthy, or nil. It gets the UUIDs of both, which are
// equal for a whole GPU.
func (m *Monitor) Check(ctx context.Context, gpuUUID, uuid string) error {
	status := func() (health.Status, bool) {
		s, known := m.machine.Statuses()[uuid]
		return s, known
	}
	return m.checkState(ctx, gpuUUID, status, health.Healthy)
}

// CheckReset probes a GPU after a reset. It returns nil if the GPU is healthy or recovering, and otherwise why it is
// not. A recovering GPU needs only time. A cordon of the GPU is ignored.
func (m *Monitor) CheckReset(ctx context.Context, uuid string) error {
	status := func() (health.Status, bool) { return m.machine.StatusWithoutCordon(uuid) }
	return m.checkState(ctx, uuid, status, health.Healthy, health.Recovering)
}

// checkState probes a GPU, and returns an error that names the state of a device unless that is one of the wanted
// states.
func (m *Monitor) checkState(
	ctx context.Context, gpuUUID string, status func() (health.Status, bool), wanted ...health.State,
) error {
	if _, err := m.probe(ctx, gpuUUID); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch s, known := status(); {
	case !known:
		return errors.New("the driver does not report it")
	case !slices.Contains(wanted, s.State):
		return errors.New("it is " + s.String())
	}
	return nil
}

// WasReset records that a GPU was reset, which may have been the remedy for its fault.
func (m *Monitor) WasReset(gpuUUID string) {
	m.mu.Lock()
	m.machine.WasReset(time.Now(), gpuUUID)
	m.mu.Unlock()
	m.saveOrRemark() // the reset may end after run
}

// CannotReset returns the reason that SetCannotReset recorded, also in an earlier run, or "".
func (m *Monitor) CannotReset(gpuUUID string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.CannotReset(gpuUUID)
}

// SetCannotReset records why a GPU cannot be reset. The record ends when the GPU is reset, the driver changes or the
// host reboots.
func (m *Monitor) SetCannotReset(gpuUUID, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.machine.SetCannotReset(gpuUUID, reason)
	m.unsaved = true
}

// setInUse is Reconciler.SetInUse, but publishes nothing. It returns the device's status afterwards.
func (m *Monitor) setInUse(uuid, reason string) ([]health.Transition, health.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.SetInUse(time.Now(), uuid, reason), m.machine.Statuses()[uuid]
}

// inUse reports whether a device is marked by Reconciler.SetInUse.
func (m *Monitor) inUse(uuid string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.InUse(uuid)
}

// needsFrequentProbes reports whether a device may soon become healthy, if its probes pass or an old reset ends.
func (m *Monitor) needsFrequentProbes() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.NeedsFrequentProbes() || len(m.heldByOldReset) > 0
}
