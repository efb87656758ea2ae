// Package node reconciles a node: the GPUs that it has, the CDI specs and device descriptors on disk, and the devices
// that can be given to containers.
//
// A Reconciler works when something has changed (the CDI directories, the driver's files, the device nodes), when it is
// triggered, and at an interval of at most 30 seconds. Each time it goes through four steps:
//   - scan reads the node and returns what is desired;
//   - newPlan plans the files for that beside the spec files of others, and writes nothing;
//   - writeSpecs and writeDescriptors write the difference to the disk;
//   - stateOf makes the State that is published, of the plan less what could not be written (pure).
//
// A device is healthy in a State if engines take it from the spec on disk with the desired edits: a new device is
// published after the spec has it, and a device that is gone leaves the published state before the spec loses it.
//
// The package reads the GPUs through a Source. A door reads the published state and nothing else of the node.
package node

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/dirwatch"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// Source reads the node's GPUs.
type Source interface {
	// Snapshot returns every GPU, an unreadable one with its error. An error concerns the driver as a whole.
	Snapshot(ctx context.Context) (*gpu.Snapshot, error)
	// Library is the path of the driver's library that would be loaded now, or empty if it is unknown.
	Library() string
	// Released reports whether the library was closed on request. Snapshot then returns the one before.
	Released() bool
}

// Observer receives each reconciliation, for metrics.
type Observer interface {
	// Reconciled gets the duration, whether a spec was written or removed, and the error.
	Reconciled(took time.Duration, written bool, err error)
}

// Options are what a Reconciler works with. Host, Source, Build and Publish are required.
type Options struct {
	Host   host.Host
	Source Source
	// Spec is what the spec depends on besides the node.
	Spec cdi.Options
	// Path is the spec file. Empty means that no spec is written, and that devices need none to be healthy.
	Path string
	// Dirs are the CDI directories, from the lowest priority to the highest; Path is in one of them.
	Dirs []string
	// DescriptorDir is the directory of the device descriptors; empty means that there are none.
	DescriptorDir string
	// ByIndex names devices by index, and not by UUID, in what containers get.
	ByIndex bool
	// Extras are what containers get besides GPUs. Their spec files are in the directory of Path.
	Extras []Extra
	// Check returns why containers must not be given the devices whatever the driver says, such as a hook that is gone.
	// It is called at each reconciliation; nil checks nothing.
	Check func() error
	// Build returns the resources of a snapshot, and what it found about them.
	Build func(*gpu.Snapshot) ([]resource.Resource, []resource.Finding, error)
	// Publish gets each state that differs from the one before, in order. It returns when the state is in effect.
	Publish func(State)
	// Search is a search for the driver's files that has begun already, for the first reconciliation; nil begins one
	// then.
	Search *driver.Search
	// AwaitDriver makes Start succeed on a node without a usable driver; Run waits for one.
	AwaitDriver bool
	// Interval is the longest time between the starts of two reconciliations; 0 is 30 seconds.
	Interval time.Duration
	// GPUInterval is how often the source is asked whether its GPUs are as at the last reconciliation; 0 is Interval.
	GPUInterval time.Duration
	// Log gets what happens; nil is the default logger.
	Log *slog.Logger
	// Observer may be nil.
	Observer Observer
	// Health is how the health of the devices is watched; nil leaves it to the snapshots alone.
	Health *HealthOptions
	// Uevents opens a source of the kernel's messages about devices that come and go; nil polls for them alone.
	Uevents func() (io.ReadCloser, error)

	// For tests.
	poll       time.Duration
	newWatcher func() (*fsnotify.Watcher, error)
}

// Reconciler is the actor that reconciles the node. Call Start once, then Run once.
type Reconciler struct {
	opts        Options
	log         *slog.Logger
	files       []*specFile // that of the GPUs, then those of the extras in the order of the options
	descriptors *descriptors
	wake        wake.Chan    // to reconcile soon
	heartbeat   atomic.Int64 // when Run last continued, in Unix nanoseconds

	monitor *monitor // nil without Options.Health

	publishing sync.Mutex // held while a state is made, published and passed on
	mu         sync.Mutex
	state      State // the last that was published
	reconciled State // the same without the health of the devices

	// The goroutine of Start, and then of Run, alone uses what follows.
	plan               *plan     // the last that was written; nil until the node has had a driver
	library            string    // the path of the driver's library at the last reconciliation
	loaded             fileid.ID // that file when the process loaded it
	failures           int       // consecutive failed reconciliations
	inputs             uint64    // the fingerprint of what the last reconciliation read, before it
	descriptorsWritten uint64    // the fingerprint of the descriptors after they were written
}

// New returns a Reconciler. Call it before the driver's library is loaded: it notes which file that is, so that a
// replaced driver is noticed.
func New(o Options) *Reconciler {
	o.Interval = cmp.Or(o.Interval, 30*time.Second)
	o.GPUInterval = cmp.Or(o.GPUInterval, o.Interval)
	o.poll = cmp.Or(o.poll, pollInterval)
	o.Spec.Kind = cmp.Or(o.Spec.Kind, cdi.DefaultKind)
	o.Log = cmp.Or(o.Log, slog.Default())
	if o.newWatcher == nil {
		o.newWatcher = dirwatch.New
	}
	if o.Path != "" {
		o.Path = filepath.Clean(o.Path)
	}
	r := &Reconciler{
		opts:        o,
		log:         o.Log,
		files:       []*specFile{newSpecFile(o.Path, o.Spec.Kind, nil)},
		descriptors: newDescriptors(o.DescriptorDir),
		wake:        wake.New(),
	}
	for i := range o.Extras {
		kind := o.Extras[i].Kind(o.Spec.Kind)
		r.files = append(r.files, newSpecFile(fileIn(&o, kind), kind, &r.opts.Extras[i]))
	}
	if o.Health != nil {
		r.monitor = newMonitor(o.Health, o.Log, o.Host, r.republish)
	}
	r.findLibrary()
	r.heartbeat.Store(time.Now().UnixNano())
	return r
}

// State is the last state that was published.
func (r *Reconciler) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// Receive takes an event of the driver. It returns when the state that follows is published. Call it after Start has
// begun, but for gpu.EventUnbind. XIDs that arrive before the first devices are known are kept until then.
func (r *Reconciler) Receive(e gpu.Event) {
	switch e.Kind {
	case gpu.EventUnbind:
		r.receiveUnbind(e.Err)
		return
	case gpu.EventMIG:
		r.Trigger()
	default:
	}
	if r.monitor != nil {
		r.monitor.receive(e)
	}
}

// receiveUnbind reconciles, since a GPU is to be unbound from the driver.
func (r *Reconciler) receiveUnbind(err error) {
	if err != nil {
		r.log.Warn("the driver does not report that a GPU is to be unbound from it, which then waits until this program " +
			"has closed the driver: " + err.Error())
		return
	}
	r.log.Info("the driver is about to be unbound from a GPU; the kernel waits until no program has the GPU open: " +
		"this program closes it")
	r.Trigger()
}

// CheckHealth probes a GPU now, and returns why a device on it is not healthy, or nil. Both are named by UUIDs, and are
// the same for a whole GPU. It needs Options.Health.
func (r *Reconciler) CheckHealth(ctx context.Context, gpuUUID, uuid string) error {
	return r.monitor.check(ctx, gpuUUID, uuid)
}

// CheckReset probes a GPU that was reset, and returns why it is neither healthy nor recovering, or nil. Whether it is
// cordoned does not matter. It needs Options.Health.
func (r *Reconciler) CheckReset(ctx context.Context, uuid string) error {
	return r.monitor.checkReset(ctx, uuid)
}

// WasReset notes that a GPU was reset, which is what it may have needed. It needs Options.Health.
func (r *Reconciler) WasReset(gpuUUID string) { r.monitor.wasReset(gpuUUID) }

// SetCannotReset notes why a GPU cannot be reset, until it is reset, the driver changes or the node reboots. It needs
// Options.Health.
func (r *Reconciler) SetCannotReset(gpuUUID, reason string) {
	r.monitor.setCannotReset(gpuUUID, reason)
}

// CannotReset returns the reason of SetCannotReset, also by an earlier run, or "". It needs Options.Health.
func (r *Reconciler) CannotReset(gpuUUID string) string { return r.monitor.cannotReset(gpuUUID) }

// Knows reports whether a device can be cordoned: it is there, or was and is remembered, also before the driver has
// come. It needs Options.Health.
func (r *Reconciler) Knows(uuid string) bool { return r.monitor.knows(uuid) }

// Cordon takes a device that Knows knows out of service for a reason, and with a GPU its MIG devices, until Uncordon.
// When it returns the state is published and on record: after an error it may not survive a restart. It needs
// Options.Health.
func (r *Reconciler) Cordon(uuid, reason string) error {
	return r.monitor.cordon(uuid, cmp.Or(reason, "no reason was given"))
}

// Uncordon ends Cordon. It returns an error for a MIG device of a GPU that is cordoned.
func (r *Reconciler) Uncordon(uuid string) error { return r.monitor.cordon(uuid, "") }

// HoldForReset takes a GPU and its MIG devices out of service until EndHold or the end of this process. A cordon
// neither sets nor lifts it. When it returns the state is published. It needs Options.Health.
func (r *Reconciler) HoldForReset(gpuUUID string) error { return r.monitor.holdForReset(gpuUUID) }

// EndHold ends HoldForReset.
func (r *Reconciler) EndHold(gpuUUID string) { r.monitor.endHold(gpuUUID) }

// SetLeftInUse marks a device as in use after its last container, for a reason that is a part of a sentence, or with an
// empty reason no longer. One that is healthy otherwise is suspect while it is marked. It needs Options.Health.
func (r *Reconciler) SetLeftInUse(uuid, reason string) { r.monitor.setLeftInUse(uuid, reason) }

// LeftInUse reports whether a device is marked by SetLeftInUse, also by an earlier run. It needs Options.Health.
func (r *Reconciler) LeftInUse(uuid string) bool { return r.monitor.leftInUse(uuid) }

// Trigger asks for a reconciliation soon. It does not wait for it.
func (r *Reconciler) Trigger() { r.wake.Wake() }
