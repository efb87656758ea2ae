// Package node reconciles a node: its GPUs, the CDI specs and device descriptors on disk, and the devices that
// containers can get.
//
// A Reconciler reconciles when it is triggered, when the CDI directories change, and when a poll finds that the host
// or the GPUs have changed. Polls also probe the health of the GPUs. A reconciliation has four steps:
//   - scan reads the node and returns what is desired;
//   - newPlan plans the files for that beside the spec files of others, and writes nothing;
//   - writeSpecs and writeDescriptors write the difference to the disk;
//   - stateOf makes the State that is published: the plan without what could not be written (pure).
//
// A device is healthy in a State if engines take it from the spec on disk with the desired edits. So a new device is
// published after it is in the spec, and a device that is gone is removed from the published state before it is
// removed from the spec.
//
// The package reads the GPUs through a Source. Consumers of the package know only the published State.
package node

import (
	"cmp"
	"context"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// Source reads the node's GPUs.
type Source interface {
	// Snapshot returns every GPU. A GPU that could not be read has an error. The error of Snapshot concerns the driver
	// as a whole.
	Snapshot(ctx context.Context) (*gpu.Snapshot, error)
	// Library returns the path of the driver's library that would be loaded at present, or empty if it is unknown.
	Library() string
	// Released reports whether the library was closed on request. Snapshot then returns the previous snapshot.
	Released() bool
	// Notify registers the function `events`, which is called for each event of the driver, and `changed`, which is
	// called when GPUs may have changed without an event, for example while the library was closed. New calls Notify
	// before any other method.
	Notify(events func(gpu.Event), changed func())
}

// Observer is notified of each reconciliation, for metrics.
type Observer interface {
	// Reconciled notifies of a reconciliation: its duration, whether a spec was written or removed, and the error.
	Reconciled(took time.Duration, written bool, err error)
}

// Options are the parameters of a Reconciler. Host, Source and Build are required.
type Options struct {
	Host   host.Host
	Source Source
	// Spec are the options of the CDI spec.
	Spec cdi.Options
	// Path is the path of the spec file. If it is empty, no spec is written, and devices need no spec to be healthy.
	Path string
	// Dirs are the CDI directories, from the lowest priority to the highest. Path is in one of them.
	Dirs []string
	// DescriptorDir is the directory of the device descriptors; empty means none.
	DescriptorDir string
	// WithoutCDI adds to each grant what a container gets from a runtime that reads no CDI spec and runs no hook.
	WithoutCDI bool
	// MPSClient returns what a container needs to use a GPU through its MPS control daemon; nil adds nothing.
	MPSClient func(gpuUUID string) specs.ContainerEdits
	// ByIndex makes the CDI names of devices contain the index instead of the UUID.
	ByIndex bool
	// Extras are what containers get besides GPUs. Their spec files are in the directory of Path.
	Extras []Extra
	// Check returns why containers must not get devices, for example because the hook is missing. It is called at each
	// reconciliation. Nil means that there is nothing to check.
	Check func() error
	// Build returns the resources of a snapshot, and findings about them.
	Build func(*gpu.Snapshot) ([]resource.Resource, []resource.Finding, error)
	// Search is a search for the driver's files that has begun, for the first reconciliation. If it is nil, one is
	// started then.
	Search *driver.Search
	// AwaitDriver makes Start succeed if the host has no usable driver. Run then waits for the driver.
	AwaitDriver bool
	// Rest closes the driver if nothing needs it, and reports whether it has. Run then calls the driver only when
	// something has changed. It is called after a poll that found all GPUs healthy. Nil keeps the driver open.
	Rest func(context.Context) bool
	// Interval is the time between two polls; 0 means PollInterval. If probes may soon make a device healthy, the time is
	// at most a second.
	Interval time.Duration
	// Log is the logger; nil means the default logger.
	Log *slog.Logger
	// Observer is notified of reconciliations; optional.
	Observer Observer
	// Health configures the health monitoring of the devices.
	Health HealthOptions
}

// Reconciler reconciles the node. Call Start once, then Run once, then Unlock.
type Reconciler struct {
	opts        Options
	log         *slog.Logger
	files       []*specFile // the file for the GPUs, then those for the extras in the order of the options
	descriptors *descriptors
	wake        wake.Chan    // to reconcile soon
	heartbeat   atomic.Int64 // when Run last made progress, in Unix nanoseconds

	monitor *Monitor

	publishTo  func(State)
	publishing sync.Mutex // held while a state is made and published
	mu         sync.Mutex
	state      State // the last published state

	// Only the goroutine of Scan and Start, and later of Run, uses the fields below.
	scanned    *desired             // what Scan has read for Start
	plan       *plan                // the last plan that was written; nil until the node has had a driver
	library    string               // the path of the driver's library at the last reconciliation
	loaded     fileio.ID            // identity of that file when the process loaded it
	driverDirs []string             // the directories of the driver's files at the last reconciliation
	failures   int                  // consecutive failed reconciliations
	reconciled time.Time            // when the last reconciliation began
	polled     time.Time            // when the last poll began
	late       bool                 // whether a GPU did not answer that poll yet
	resting    bool                 // whether the driver is closed until something changes; see Options.Rest
	seen       map[string]fileio.ID // identities of what the last reconciliation depends on; see identify
}

// New returns a Reconciler. Call it before the driver's library is loaded: it records the identity of the library's
// file, and so notices later that the driver was replaced.
func New(o Options) *Reconciler {
	o.Interval = cmp.Or(o.Interval, PollInterval)
	o.Spec.Kind = cmp.Or(o.Spec.Kind, cdi.DefaultKind)
	o.Log = cmp.Or(o.Log, slog.Default())
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
	r.monitor = newMonitor(&o.Health, o.Log, o.Host, r.republish)
	o.Source.Notify(r.Receive, r.examine)
	r.findLibrary()
	r.heartbeat.Store(time.Now().UnixNano())
	return r
}

// State returns the last published state.
func (r *Reconciler) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// Receive handles an event of the driver. When it returns, the resulting state is published. Only gpu.EventUnbind may
// be passed before Start has begun. XIDs that arrive before the first devices are known are kept until then.
func (r *Reconciler) Receive(e gpu.Event) {
	switch e.Kind {
	case gpu.EventUnbind:
		r.receiveUnbind(e.Err)
		return
	case gpu.EventMIG:
		r.Trigger()
	default:
	}
	r.monitor.receive(e)
}

// receiveUnbind triggers a reconciliation, since a GPU is about to be unbound from the driver.
func (r *Reconciler) receiveUnbind(err error) {
	if err != nil {
		r.log.Warn("the driver does not report when a GPU is about to be unbound from it, so an unbinding waits until this " +
			"program closes the driver for another reason: " + err.Error())
		return
	}
	r.log.Info("a GPU is about to be unbound from the driver: closing the driver, since the kernel waits until no " +
		"program has the GPU open")
	r.Trigger()
}

// Monitor returns the monitor of the devices' health.
func (r *Reconciler) Monitor() *Monitor { return r.monitor }

// Trigger requests a reconciliation. It does not wait for it.
func (r *Reconciler) Trigger() { r.wake.Wake() }

// examine requests a reconciliation and probes of all GPUs, since no event shows what has changed.
func (r *Reconciler) examine() {
	r.Trigger()
	r.monitor.probeNow.Wake()
}
