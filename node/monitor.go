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

// Prober reads what the driver reports about the health of GPUs of the last snapshot: those with these UUIDs, or all.
type Prober interface {
	Probes(ctx context.Context, uuids ...string) ([]gpu.Probe, error)
}

// HealthObserver receives what happens to the health of devices, for metrics.
type HealthObserver interface {
	// Event gets each event of a GPU but gpu.EventSource.
	Event(gpu.Event)
	// EventSource gets whether the events of a GPU are received.
	EventSource(gpuUUID string, received bool)
}

const (
	// probeInterval is how often healthy GPUs are probed, and suspectInterval how often others are.
	probeInterval   = 5 * time.Second
	suspectInterval = time.Second
	// minProbePause is the shortest time between two probes.
	minProbePause = 200 * time.Millisecond
	// maxLogged bounds the reasons that are remembered of a device, in bytes: those with the process IDs of a program
	// that is started again and again have no end.
	maxLogged = 4 << 10
	// maxGap is how long the driver's library may be closed before the state and the log say that events are missed: most
	// resets are shorter.
	maxGap = 10 * time.Second
	// maxWaitingXIDs bounds the different XIDs that wait for their GPU to be known, which takes milliseconds, or until
	// the driver's files are as they should be. A machine has at most 16 GPUs, and a GPU has few codes.
	maxWaitingXIDs = 1024
	// saveInterval is how often counters are saved if no state changes.
	saveInterval = time.Minute
)

// HealthOptions are how the health of the devices is watched.
type HealthOptions struct {
	Prober Prober
	Rules  health.Rules
	// Path is the file with the record of the devices' health, for the next start. Empty means that there is none.
	Path string
	// StillResetting returns the UUIDs of the GPUs whose reset goes on although the run of the program that started it
	// has ended. Nil means that there are none.
	StillResetting func() ([]string, error)
	// Observer may be nil.
	Observer HealthObserver
}

// monitor has the health of the devices. It takes the driver's events when they happen, probes the GPUs, and records
// the result for the next start.
type monitor struct {
	HealthOptions
	log      *slog.Logger
	changed  func() // publishes the health
	host     host.Host
	probeNow wake.Chan

	mu             sync.Mutex
	machine        *health.Machine
	names          map[string]string // what people call a device, such as "GPU 3", by UUID
	waitingXIDs    []waitingXID      // of GPUs that setDevices has not had yet
	loggedEvents   map[string]bool   // the lines about the first event of each kind of a GPU
	closed         time.Time         // since when the library has been closed; zero if it is not
	loaded         bool              // whether the record was read: before that none is written
	identity       health.Identity   // of the record
	heldByOldReset []string          // UUIDs of the GPUs held for a reset that an earlier run of serve started
	heldReason     string            // why these are held
	unsaved        bool              // whether the record lacks a transition that is worth saving
	loggedReasons  map[string]string // the reasons that were logged of each device since it was healthy, by UUID

	saving    sync.Mutex // held while the record is written
	saved     []byte     // the last record that was read or written
	saveError string     // why the last one could not be written
}

// waitingXID is an XID event of a GPU that is not known yet, and how often it came.
type waitingXID struct {
	gpu.Event
	count int
}

func newMonitor(h *HealthOptions, log *slog.Logger, host host.Host, changed func()) *monitor {
	return &monitor{
		HealthOptions: *h, log: log, changed: changed, host: host, probeNow: wake.New(),
		machine: health.New(h.Rules), loggedEvents: map[string]bool{}, loggedReasons: map[string]string{},
	}
}

// setDevices takes the devices that there are, then the XIDs that they have had since the snapshot. The first devices
// are as they were recorded.
func (m *monitor) setDevices(s *gpu.Snapshot) {
	for _, e := range m.replaceDevices(s) {
		for range e.count {
			m.receiveXID(e.Event)
		}
	}
}

// replaceDevices returns the XIDs that waited for these devices.
func (m *monitor) replaceDevices(s *gpu.Snapshot) (xids []waitingXID) {
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

// logChangedGPUs logs which GPUs disappeared and which appeared; before has the names of the last snapshot.
func (m *monitor) logChangedGPUs(before map[string]string) {
	for _, uuid := range slices.Sorted(maps.Keys(before)) {
		if name := before[uuid]; isGPU(name) && m.names[uuid] == "" {
			m.log.Warn(name + " is gone: the driver does not have " + uuid + " any more")
		}
	}
	for _, uuid := range slices.Sorted(maps.Keys(m.names)) {
		if name := m.names[uuid]; before != nil && isGPU(name) && before[uuid] == "" {
			m.log.Info(name + " is new: " + uuid)
		}
	}
}

// isGPU reports whether people call a GPU this, and no MIG device.
func isGPU(name string) bool { return strings.HasPrefix(name, "GPU ") }

// healthDevices are the devices of a snapshot, a GPU before its MIG devices, and what people call them, by UUID.
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

// gpus are the UUIDs of the GPUs.
func (m *monitor) gpus() (uuids []string) {
	for uuid, name := range m.names {
		if isGPU(name) {
			uuids = append(uuids, uuid)
		}
	}
	return uuids
}

// report logs transitions and publishes the state that follows from them.
func (m *monitor) report(transitions []health.Transition) {
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

// logTransition logs a transition. A fault that comes and goes before the device is healthy again is logged once.
func (m *monitor) logTransition(t *health.Transition) {
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
	if again || t.To.Reason == health.NotAnswering { // the remark on the snapshot says more
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
func (m *monitor) withHealth(s State) State {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.Health = m.machine.Statuses()
	s.Resources = resource.MarkUnhealthy(s.Resources, func(d *resource.Device) string {
		h, known := s.Health[d.UUID]
		if !known || h.State == health.Healthy {
			return ""
		}
		d.Fault = h.State != health.Cordoned // of the copy: it goes with the reason
		return h.String()
	})
	s.remarks = slices.Clone(s.remarks)
	remark := func(key, text, why string) {
		r := newRemark(key, text, errors.New(why))
		r.level = slog.LevelWarn
		s.remarks = append(s.remarks, r)
	}
	closed := false
	for _, uuid := range slices.Sorted(maps.Keys(s.Health)) {
		switch why := s.Health[uuid].EventsMissed; why {
		case "":
		case libraryClosed:
			closed = true
		default:
			const text = "events of %s are not received, and its faults are noticed by probes alone"
			remark("events of "+uuid, fmt.Sprintf(text, m.names[uuid]), why)
		}
	}
	if closed { // one line for all GPUs
		remark("events", "faults of GPUs are not noticed", libraryClosed)
	}
	return s
}

// run probes the GPUs and saves their health until ctx ends.
func (m *monitor) run(ctx context.Context) {
	timer := time.NewTimer(m.interval())
	defer timer.Stop()
	due := time.Now().Add(saveInterval)
	var probed time.Time
	for {
		select {
		case <-ctx.Done():
			m.saveOrLog()
			return
		case <-m.probeNow:
			if wait := minProbePause - time.Since(probed); wait > 0 { // a container can cause events in a loop
				timer.Reset(wait)
				continue
			}
		case <-timer.C:
		}
		m.publishGap()
		if m.hasUnsaved() { // by an event; the driver may not answer the probe for long
			m.saveOrLog()
		}
		probed = time.Now()
		ended := m.endedOldResets()
		_ = m.probe(ctx) // while the driver as a whole does not answer, nothing is known about the GPUs
		m.endOldResets(ended)
		if m.hasUnsaved() || time.Now().After(due) {
			m.saveOrLog()
			due = time.Now().Add(saveInterval)
		}
		timer.Reset(m.interval())
	}
}

// probe probes GPUs by their UUIDs, or all.
func (m *monitor) probe(ctx context.Context, uuids ...string) error {
	probes, err := m.Prober.Probes(ctx, uuids...)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("probe the GPUs: %w", err)
	}
	var transitions []health.Transition
	m.mu.Lock()
	for i := range probes {
		transitions = append(transitions, m.machine.Probe(time.Now(), &probes[i])...)
	}
	m.mu.Unlock()
	m.report(transitions)
	return nil
}

// check probes a GPU and returns why a device on it is not healthy, or nil.
func (m *monitor) check(ctx context.Context, gpuUUID, uuid string) error {
	status := func() (health.Status, bool) {
		s, known := m.machine.Statuses()[uuid]
		return s, known
	}
	return m.checkState(ctx, gpuUUID, status, health.Healthy)
}

// checkReset probes a GPU after a reset and returns why it is neither healthy nor recovering, or nil. A recovering GPU
// only needs time.
func (m *monitor) checkReset(ctx context.Context, uuid string) error {
	status := func() (health.Status, bool) { return m.machine.StatusWithoutCordon(uuid) }
	return m.checkState(ctx, uuid, status, health.Healthy, health.Recovering)
}

// checkState probes a GPU, and returns an error with the device's state unless that is one of the wanted states.
func (m *monitor) checkState(
	ctx context.Context, gpuUUID string, status func() (health.Status, bool), wanted ...health.State,
) error {
	if err := m.probe(ctx, gpuUUID); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch s, known := status(); {
	case !known:
		return errors.New("the driver does not have it")
	case !slices.Contains(wanted, s.State):
		return errors.New("it is " + s.String())
	}
	return nil
}

func (m *monitor) wasReset(gpuUUID string) {
	m.mu.Lock()
	m.machine.WasReset(time.Now(), gpuUUID)
	m.mu.Unlock()
	m.saveOrLog() // the reset may have ended after run
}

func (m *monitor) cannotReset(gpuUUID string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.CannotReset(gpuUUID)
}

func (m *monitor) setCannotReset(gpuUUID, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.machine.SetCannotReset(gpuUUID, reason)
	m.unsaved = true
}

func (m *monitor) setLeftInUse(uuid, reason string) {
	m.mu.Lock()
	transitions := m.machine.SetLeftInUse(time.Now(), uuid, reason)
	m.mu.Unlock()
	m.report(transitions)
}

func (m *monitor) leftInUse(uuid string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.LeftInUse(uuid)
}

// interval is the time to the next probes.
func (m *monitor) interval() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.machine.NeedsFrequentProbes() || len(m.heldByOldReset) > 0 {
		return suspectInterval
	}
	return probeInterval
}
