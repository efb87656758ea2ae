// Package node reconciles a node: the GPUs that it has, the CDI specs and device descriptors on disk, and the devices
// that can be given to containers.
//
// A Reconciler reconciles when it is triggered, when the CDI directories change, and when a poll finds that the
// host or the GPUs have changed since. Polls also probe the health of the GPUs. A reconciliation has four steps:
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
	// Snapshot returns every GPU, an unreadable one with its error. An error concerns the driver as a whole.
	Snapshot(ctx context.Context) (*gpu.Snapshot, error)
	// Library is the path of the driver's library that would be loaded now, or empty if it is unknown.
	Library() string
	// Released reports whether the library was closed on request. Snapshot then returns the one before.
	Released() bool
	// Notify has events called for each event of the driver, and changed when GPUs may be readable again. New calls it,
	// before any other method.
	Notify(events func(gpu.Event), changed func())
}

// Observer receives each reconciliation, for metrics.
type Observer interface {
	// Reconciled gets the duration, whether a spec was written or removed, and the error.
	Reconciled(took time.Duration, written bool, err error)
}

// Options are what a Reconciler works with. Host, Source and Build are required.
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
	// MPSClient returns what a container needs to use a GPU through its MPS control daemon; nil adds nothing.
	MPSClient func(gpuUUID string) specs.ContainerEdits
	// ByIndex names devices by index, and not by UUID, in what containers get.
	ByIndex bool
	// Extras are what containers get besides GPUs. Their spec files are in the directory of Path.
	Extras []Extra
	// Check returns why containers must not be given the devices whatever the driver says, such as a hook that is gone.
	// It is called at each reconciliation; nil checks nothing.
	Check func() error
	// Build returns the resources of a snapshot, and what it found about them.
	Build func(*gpu.Snapshot) ([]resource.Resource, []resource.Finding, error)
	// Search is a search for the driver's files that has begun already, for the first reconciliation; nil begins one
	// then.
	Search *driver.Search
	// AwaitDriver makes Start succeed on a node without a usable driver; Run waits for one.
	AwaitDriver bool
	// Interval is the time between two polls; 0 is 5 seconds. It is at most a second while probes may soon make a device
	// healthy.
	Interval time.Duration
	// Log gets what happens; nil is the default logger.
	Log *slog.Logger
	// Observer may be nil.
	Observer Observer
	// Health is how the health of the devices is watched.
	Health HealthOptions
}

// Reconciler is the actor that reconciles the node. Call Start once, then Run once.
type Reconciler struct {
	opts        Options
	log         *slog.Logger
	files       []*specFile // that of the GPUs, then those of the extras in the order of the options
	descriptors *descriptors
	wake        wake.Chan    // to reconcile soon
	heartbeat   atomic.Int64 // when Run last continued, in Unix nanoseconds

	monitor *Monitor

	publishTo  func(State)
	publishing sync.Mutex // held while a state is made, published and passed on
	mu         sync.Mutex
	state      State // the last that was published

	// Only the goroutine of Start, and then of Run, uses what follows.
	plan       *plan                // the last that was written; nil until the node has had a driver
	library    string               // the path of the driver's library at the last reconciliation
	loaded     fileio.ID            // that file when the process loaded it
	failures   int                  // consecutive failed reconciliations
	reconciled time.Time            // when the last reconciliation began
	polled     time.Time            // when the last poll began
	seen       map[string]fileio.ID // what the last reconciliation depends on; see identify
}

// New returns a Reconciler. Call it before the driver's library is loaded: it notes which file that is, so that a
// replaced driver is noticed.
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
	o.Source.Notify(r.Receive, r.Trigger)
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
	r.monitor.receive(e)
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

// Monitor has the health of the devices.
func (r *Reconciler) Monitor() *Monitor { return r.monitor }

// Trigger asks for a reconciliation soon. It does not wait for it.
func (r *Reconciler) Trigger() { r.wake.Wake() }
