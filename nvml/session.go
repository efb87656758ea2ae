package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// DefaultTimeout is the default of Options.Timeout. It is long because a driver without persistence mode wakes its
// GPUs one after the other on first use, which takes seconds for each.
const DefaultTimeout = 30 * time.Second

// Options are the parameters of a Session, ReadDevices and ReadTopology. Host is required.
type Options struct {
	// Host has the paths of the driver and of the kernel's files about GPUs.
	Host host.Host
	// Library is the path of NVML's library. If it is empty, [Find] detects it.
	Library string
	// Check returns an error if a library must not be loaded into the process. Nil accepts any.
	Check func(path string) error
	// Timeout is how long each of these may take: nvmlInit, the first answers about all GPUs together, and the first
	// answers about all links together. 0 means DefaultTimeout.
	Timeout time.Duration
	// GPUTimeout and Log are only for a [Session].
	//
	// GPUTimeout is how long a GPU may not answer before a probe or snapshot reports that it cannot be read. A probe
	// must be made every [ProbeInterval], and at once after one that is late.
	GPUTimeout time.Duration
	// Log gets warnings about links that cannot be read.
	Log *slog.Logger
}

// Divisors of Options.GPUTimeout. A probe begins at most half of it after a GPU has stopped answering, and a call may
// hang for a quarter of it. The rest is for delays on a busy machine.
const (
	probesPerTimeout = 2
	toleratedDivisor = 4
	openDivisor      = 3
)

// ProbeInterval is how often the GPUs must be probed to keep to [Options.GPUTimeout].
func ProbeInterval(gpuTimeout time.Duration) time.Duration { return gpuTimeout / probesPerTimeout }

// maxWait is how long a session's snapshot waits for the GPUs, and then as long again for their links.
const maxWait = time.Second

// Session reads a host's driver repeatedly. It opens the library on first use, and reopens it if NVML may then show
// other GPUs. Its methods may be called by several goroutines at once. A process can use only one session at a time.
type Session struct {
	opts    Options
	events  func(gpu.Event) // nil if events are not received
	changed func()          // called when the GPUs may have changed without an event; may be nil

	mu        sync.Mutex    // held while a snapshot is taken, and while the library is opened or closed
	library   *library      // nil while the library is closed
	loaded    *library      // the process's library, open or not; nil before it is loaded
	users     atomic.Int32  // number of goroutines that use the library without mu
	last      *gpu.Snapshot // nil before the first snapshot
	retained  retainedLinks
	probed    map[string]gpu.Probe // the last probes, by UUID
	watchers  *watchers            // nil while no events are received
	eventWait time.Duration        // how long a call waits for an event
	released  bool                 // see Release
	unbinding unbinding
	// bound are the GPUs that were bound to the driver when the library was opened. If they change, the library is
	// reopened.
	bound  []string
	opened time.Time       // when the library was last opened
	seen   map[string]bool // PCI addresses of GPUs in any snapshot, as long as the kernel module has them
}

// NewSession returns a session that has not opened the library yet.
func NewSession(opts Options) *Session {
	if opts.Timeout == 0 {
		opts.Timeout = DefaultTimeout
	}
	s := &Session{opts: opts, seen: map[string]bool{}}
	s.eventWait = min(maxEventWait, s.tolerated()) // closing the library waits for these calls, see openTimeout
	return s
}

// ReadDevices reads the GPUs once, without links, and closes the library. A GPU that cannot be read is in the snapshot
// with its error. A host without GPUs has an empty snapshot. An error concerns the driver as a whole: it wraps
// [gpu.ErrNoDriver], or it is the cause of ctx or the error of Options.Check.
func ReadDevices(ctx context.Context, opts Options) (*gpu.Snapshot, error) {
	opts.GPUTimeout = 0
	s := NewSession(opts)
	defer func() { _ = s.Close() }() //nolint:contextcheck // the library is closed after an interrupt too
	snapshot, _, err := s.read(ctx)
	return snapshot, err
}

// ReadTopology does what [ReadDevices] does, and also reads links. This takes six times as many calls on a machine
// with NVSwitches. If some links of a GPU cannot be read, the GPU is in the snapshot with that error, and in no link.
func ReadTopology(ctx context.Context, opts Options) (*gpu.Snapshot, error) {
	opts.GPUTimeout = 0
	s := NewSession(opts)
	defer func() { _ = s.Close() }() //nolint:contextcheck // the library is closed after an interrupt too
	return s.readTopology(ctx)
}

func (s *Session) readTopology(ctx context.Context) (*gpu.Snapshot, error) {
	snapshot, handles, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	links, errs := s.readLinks(ctx, snapshot, handles)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("read the links of the GPUs: %w", context.Cause(ctx))
	}
	for i, err := range errs {
		snapshot.Devices[i].Error = err.Error()
	}
	snapshot.Links = slices.DeleteFunc(links, func(l gpu.Link) bool { return errs[l.A] != nil || errs[l.B] != nil })
	return snapshot, nil
}

// Notify registers the function `events`, which several goroutines may call at once: for each event of the GPUs from
// the first snapshot on, and for gpu.EventUnbind from the opening of the library on. After gpu.EventUnbind, Snapshot
// closes and reopens the library. It does so only after the function has returned, so the function must not use the
// session.
//
// The function `changed` is called when the GPUs may have changed without an event: after Reopen, when an abandoned
// call has returned, so that GPUs may be readable again, and when the last call has returned that prevented closing the
// library for gpu.EventUnbind. It must not wait.
//
// Call Notify before the library is opened.
func (s *Session) Notify(events func(gpu.Event), changed func()) {
	s.events, s.changed = events, changed
}

// Library returns the path of the library that would be loaded at present, or empty if there is none.
func (s *Session) Library() string {
	path, err := Find(s.opts.Host, s.opts.Library)
	if err != nil {
		return ""
	}
	return path
}

// Open opens the library, unless it is open. It need not be called: the other methods open the library too.
func (s *Session) Open(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open(ctx)
}

// Snapshot reads the GPUs and their links. A GPU that cannot be read is in the snapshot with its error. A host without
// GPUs has an empty snapshot. An error concerns the driver as a whole and wraps [gpu.ErrNoDriver]. It wraps
// [gpu.ErrNotAnswering] if the driver does not answer in time; after the driver's first answer, that time is a quarter
// of Options.GPUTimeout.
//
// After the driver's answer, Snapshot waits at most one second for GPUs that do not answer, and one second for their
// links. For a GPU that does not answer, the snapshot has its last known properties until the call has hung for a
// quarter of Options.GPUTimeout. From then on the GPU has an error, and keeps its UUID and other properties from the
// session's previous snapshot.
func (s *Session) Snapshot(ctx context.Context) (*gpu.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.released && s.last != nil {
		return s.last, nil
	}
	if s.mayHaveOtherGPUs() {
		_ = s.close() //nolint:contextcheck // has its own deadline
	}
	snapshot, handles, err := s.read(ctx)
	if err == nil && s.mayBecomeReadable(snapshot) && s.close() == nil { //nolint:contextcheck // has its own deadline
		snapshot, handles, err = s.read(ctx)
	}
	if err != nil {
		if !errors.Is(err, gpu.ErrNotAnswering) {
			_ = s.close() //nolint:contextcheck // the kernel module may have been reloaded
		}
		return nil, err
	}
	snapshot.Links = s.links(ctx, snapshot, handles)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("read the links of the GPUs: %w", context.Cause(ctx))
	}
	nameUnreadable(snapshot, s.last)
	s.last = snapshot
	s.watch() //nolint:contextcheck // events are received until the library is closed
	return snapshot, nil
}

// reopenPause is the shortest time between two reopenings of the library for GPUs that cannot be read or are being
// unbound. While the library is closed, no events of any GPU are received.
const reopenPause = time.Minute

// mayHaveOtherGPUs reports whether the library must be reopened to see all GPUs: NVML counts them only in nvmlInit.
// Until the next nvmlInit a removed GPU seems lost, and an added one does not appear. A GPU that is being unbound
// cannot be opened again, and waits until the library is closed.
func (s *Session) mayHaveOtherGPUs() bool {
	return s.library != nil && (s.unbinding.due() || !slices.Equal(s.bound, host.BoundGPUs(s.opts.Host)) ||
		s.last != nil && len(s.last.Devices) == 0) // then no event can be missed
}

// mayBecomeReadable reports whether the library should be reopened for GPUs that cannot be read. A GPU that was lost
// and is back still seems lost before that, and so does one that was removed without the kernel module's knowledge.
func (s *Session) mayBecomeReadable(snapshot *gpu.Snapshot) bool {
	return s.lacksGPUs(snapshot) && !s.busy() && time.Since(s.opened) >= reopenPause
}

// lacksGPUs reports whether a GPU cannot be read, or NVML no longer has a GPU that the kernel module still has. GPUs
// that were never in a snapshot do not count: NVML may never see them, for example in a container with only some of
// the GPUs.
func (s *Session) lacksGPUs(snapshot *gpu.Snapshot) bool {
	maps.DeleteFunc(s.seen, func(address string, _ bool) bool { return !slices.Contains(s.bound, address) })
	lost := maps.Clone(s.seen)
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i]
		s.seen[d.PCIBusID], lost[d.PCIBusID] = true, !d.Usable()
	}
	return slices.Contains(slices.Collect(maps.Values(lost)), true)
}

// SetExclusive sets the compute mode of a GPU, given by its UUID: with EXCLUSIVE_PROCESS one process at a time can use
// it, with DEFAULT any number. The driver keeps the mode until it releases the GPU. Only root may change the mode; for
// other users the error wraps [ErrNoPermission]. Snapshots do not wait for this call.
func (s *Session) SetExclusive(ctx context.Context, uuid string, exclusive bool) error {
	mode := nvml.COMPUTEMODE_DEFAULT
	if exclusive {
		mode = nvml.COMPUTEMODE_EXCLUSIVE_PROCESS
	}
	_, err := withLibrary(ctx, s, "compute mode of "+uuid, func(l *library, c *call) (struct{}, error) {
		dev, err := l.deviceByUUID(c, uuid)
		if err != nil {
			return struct{}{}, err
		}
		return invoke(l, c, "nvmlDeviceSetComputeMode", noValue(func() nvml.Return { return dev.SetComputeMode(mode) }))
	})
	return settingError(ctx, "set the compute mode of "+uuid, err)
}

// Close closes the library. While a call has not returned, the library stays open and Close returns an error.
func (s *Session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.close()
}

// read opens the library and reads the GPUs.
func (s *Session) read(ctx context.Context) (*gpu.Snapshot, []nvml.Device, error) {
	if err := s.open(ctx); err != nil {
		return nil, nil, err
	}
	return s.readDevices(ctx)
}

func (s *Session) open(ctx context.Context) error {
	switch {
	case s.released:
		return ErrReleased
	case s.library != nil:
		return nil
	}
	s.bound = host.BoundGPUs(s.opts.Host)
	s.unbinding.closed()
	s.unbinding.keep(host.ModuleGPUs(s.opts.Host))
	path, err := Find(s.opts.Host, s.opts.Library)
	if err != nil {
		return host.OnPlatform(s.opts.Host, err)
	}
	if s.opts.Check != nil {
		if err := s.opts.Check(path); err != nil {
			return err
		}
	}
	l, err := load(path)
	if err != nil {
		return err
	}
	s.loaded = l
	waiting, cancel := context.WithTimeout(ctx, s.openTimeout())
	defer cancel()
	l.calls.whenReturned(s.changed)
	if err := l.initialise(waiting, s.opts.Host); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return host.OnPlatform(s.opts.Host, fmt.Errorf("initialise the NVIDIA driver library: %w", err))
	}
	s.library, s.opened = l, time.Now()
	s.watchDriver() // at once: when a GPU is to be unbound, the kernel waits until the library is closed
	return nil
}

var errInUse = errors.New("close the NVIDIA driver library: calls have not returned")

// close closes the library. If it cannot be closed yet, it stays open, and events may not be received until the next
// watch. An outstanding nvmlInit or nvmlShutdown is an error too, since the driver's files are open.
//
// It waits for the receivers of events with mu held: usually no longer than maxEventWait, and never longer than
// openTimeout. Other goroutines could do nothing meanwhile: each call needs the library that is being closed.
func (s *Session) close() error {
	switch {
	case s.busy(): // events are still received
		return errInUse
	case s.library == nil:
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.openTimeout())
	defer cancel()
	if s.watchers != nil && !s.watchers.end(ctx) {
		return errInUse
	}
	s.watchers = nil
	if s.busy() { // a wait for events was abandoned
		return errInUse
	}
	l := s.library
	s.library = nil
	if err := l.shutdown(ctx); err != nil {
		return fmt.Errorf("close the NVIDIA driver library: %w", err)
	}
	return nil
}

// busy reports whether closing the library would free memory that calls use.
func (s *Session) busy() bool {
	return s.users.Load() > 0 || s.loaded != nil && s.loaded.calls.outstanding() > 0
}

// openTimeout is how long nvmlInit, nvmlShutdown and the driver's first answer may take. It is short after the first
// snapshot, since faults of the GPUs are not noticed while the library is reopened.
func (s *Session) openTimeout() time.Duration {
	if s.last != nil && s.opts.GPUTimeout > 0 {
		return s.opts.GPUTimeout / openDivisor
	}
	return s.opts.Timeout
}

// tolerated is how long a call may hang before its subject counts as one that cannot be read.
func (s *Session) tolerated() time.Duration { return s.opts.GPUTimeout / toleratedDivisor }

// wait is how long each step of a snapshot or probe may take, such as reading the GPUs or their links.
func (s *Session) wait() time.Duration {
	if s.opts.GPUTimeout > 0 {
		return min(maxWait, s.tolerated(), s.opts.Timeout)
	}
	return s.opts.Timeout
}

// linksInterval is how often links are read if the GPUs are the same. The driver does not report when a link fails or
// recovers.
const linksInterval = 5 * time.Minute

// retainedLinks are the links that were read last.
type retainedLinks struct {
	links   []gpu.Link
	gpus    []string        // UUIDs by index, empty for a GPU that could not be read
	unread  map[string]bool // UUIDs of the GPUs whose links could not all be read
	partial bool            // links are missing because a call hung
	read    time.Time
}

// links returns the links of the GPUs. Reading them takes many more calls than everything else. So they are read again
// only if the GPUs have changed, after a hanging call has returned, and at an interval.
func (s *Session) links(ctx context.Context, snapshot *gpu.Snapshot, handles []nvml.Device) []gpu.Link {
	gpus := make([]string, len(snapshot.Devices))
	for i := range snapshot.Devices {
		if d := &snapshot.Devices[i]; d.Usable() {
			gpus[i] = d.UUID
		}
	}
	before, now := &s.retained, time.Now()
	hangs := func() bool { return s.library.calls.outstanding() > 0 }
	if slices.Equal(gpus, before.gpus) && now.Sub(before.read) < linksInterval && (!before.partial || hangs()) {
		return before.links
	}
	links, errs := s.readLinks(ctx, snapshot, handles)
	unread := map[string]bool{}
	for i, err := range errs {
		unread[gpus[i]] = true
		if !before.unread[gpus[i]] && ctx.Err() == nil {
			const message = "the links of GPU %d cannot be read; its position on PCIe and its NUMA node are used instead"
			s.opts.Log.Warn(fmt.Sprintf(message, i), "gpu", gpus[i], "error", err)
		}
	}
	s.retained = retainedLinks{links: links, gpus: gpus, unread: unread, partial: len(errs) > 0 && hangs(), read: now}
	return links
}
