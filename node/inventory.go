// Package node keeps three things in agreement: the GPUs that the node has, the CDI spec on disk, and the devices
// that the plugin lists.
//
// It looks at the node when something has changed (the CDI directories, the driver's files, the device nodes), when
// it is told to, and every 30 seconds whatever happened. What should be there is computed anew each time and compared
// with what is; only a difference is acted on. A device is listed as healthy only while the spec on disk gives
// containers what it should: one that is new is listed after the spec has it, one that is gone leaves the list first.
//
// It asks the driver through a Source and decides nothing about GPUs that the driver or the resource configuration
// does not say.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/resource"
)

// ErrDriverChanged is that the driver's library on disk is another than the one that the process has loaded, and that
// the loaded kernel module fits it. A process has one NVML library for its life, so it has to start again.
var ErrDriverChanged = errors.New("the NVIDIA driver was replaced")

// ErrLasting is an error of a Source that has lasted for so long already that no device can be given to a container.
var ErrLasting = errors.New("the GPUs cannot be used")

// Source reads the node's GPUs.
type Source interface {
	// Snapshot returns every GPU, one that cannot be read with its error. An error is about the driver as a whole.
	Snapshot(ctx context.Context) (*gpu.Snapshot, error)
	// Library is the path of the driver's library as it would be loaded now, or empty if that is not known.
	Library() string
}

// Observer is told about each reconcile, for metrics. A nil Observer is none.
type Observer interface {
	// Reconciled tells how long it took, whether the spec was written or removed, and its error.
	Reconciled(took time.Duration, written bool, err error)
}

// Options are what an inventory works with. Host, Source, Build and Publish are needed.
type Options struct {
	Host   host.Host
	Source Source
	// Spec is what the spec depends on besides the node.
	Spec cdi.Options
	// Path is the spec file. Empty is none: then nothing is written, and devices need no spec to be healthy.
	Path string
	// Dirs are the CDI directories, from the lowest priority to the highest; Path is in one of them.
	Dirs []string
	// ByIndex tells that containers are given devices by index, and not by UUID.
	ByIndex bool
	// Extras are what containers get besides GPUs. Their spec files are beside Path.
	Extras []Extra
	// Given reports whether a pod may have been given devices of a kind. Without it no spec of an extra is removed that is
	// configured no longer.
	Given func(kind string) (bool, error)
	// Build makes the resources of a snapshot.
	Build func(*gpu.Snapshot) ([]resource.Resource, error)
	// Publish gets each state that differs from the one before, in order, and returns when it is in effect.
	Publish func(State)
	// Begun is a search for the driver's files that began a moment ago, for the first look; nil has it begin then.
	Begun *cdi.Search
	// AwaitDriver tells that a node without a driver is not an error of Start: its driver is waited for.
	AwaitDriver bool
	// Interval is the time between the beginnings of two reconciles, if nothing happens; 0 is 30 seconds.
	Interval time.Duration
	// Poll is how often the host's files are looked at; 0 is a second. It notices MIG changes, for which there is no
	// notification, and everything else where inotify instances have run out.
	Poll time.Duration
	// Failures is how many snapshots in a row must fail before the devices are unhealthy; 0 is 3.
	Failures int
	// Log gets what happens; nil is the default logger.
	Log      *slog.Logger
	Observer Observer

	newWatcher func() (*fsnotify.Watcher, error) // for tests
}

// State is what the node has and offers. It is not changed after it was published.
type State struct {
	// Snapshot is the last one that could be taken. A GPU that has stopped answering keeps its name in it.
	Snapshot *gpu.Snapshot
	// Spec is what the spec file should be, or nil if there is no device to offer.
	Spec *specs.Spec
	// Extras are what containers get besides: the specs of those extras that the node has, with the devices that engines
	// find.
	Extras []*specs.Spec
	// Resources are what is offered. A device is healthy only if containers can be given it by its CDI name.
	Resources []resource.Resource
	// Err is why the state is not what it should be, or nil. It does not concern names that other spec files take.
	Err error

	extras    []*specs.Spec       // those that the node has, with all devices
	built     []resource.Resource // what the node has, whatever is on disk
	notes     map[string]string   // why devices are not in Spec, by UUID
	extrasErr error               // why containers do not get an extra that is required, or nil
	clashes   []cdi.Clash         // the names of Spec and of extras that other spec files define too
	lost      []cdi.Clash         // those of them that make a device unhealthy
}

// Remarks say what concerns devices of the node in spite of which the others are served, in a line each.
func (s *State) Remarks() []string {
	var list []string
	if s.Err != nil {
		list = append(list, s.Err.Error())
	}
	return append(list, inWords(s.lost)...)
}

// Ready is nil unless there are devices, none of them can be given to containers, and the cause is the spec files or the
// driver as a whole.
func (s *State) Ready() error {
	remarks := s.Remarks()
	listed := slices.ContainsFunc(s.Resources, func(r resource.Resource) bool { return len(r.Devices) > 0 })
	if !listed || len(remarks) == 0 || countHealthy(s.Resources) > 0 {
		return nil
	}
	return fmt.Errorf("no device can be given to containers: %s", strings.Join(remarks, "; "))
}

// Inventory is the actor that keeps the state. Make one with New before the driver's library is loaded, call Start
// once, then Run once.
type Inventory struct {
	opts Options
	log  *slog.Logger
	file *specFile
	// extras are in the order of the options.
	extras []*extraFile
	kick   chan struct{}
	beat   atomic.Int64 // when Run was last seen to go on, as Unix nanoseconds

	mu    sync.Mutex
	state State // the last that was published

	// What follows belongs to the goroutine of Start and then Run.
	began    time.Time       // Start
	library  string          // the path of the driver's library, of the last reconcile
	loaded   fileid.ID       // that file when the process loaded it
	failures int             // snapshots that failed since the last that did not
	broken   map[string]bool // libraries of the driver that cannot be used, as they were logged
	print    uint64          // of the host's files at the last reconcile
	clashes  []cdi.Clash     // that were logged
	awaiting bool            // there was no driver yet, and the spec on disk is not touched
}

// New makes an inventory. It notes which file the driver's library is now, so that a later one is noticed.
func New(o Options) *Inventory {
	o.Interval = cmp.Or(o.Interval, 30*time.Second)
	o.Poll = cmp.Or(o.Poll, time.Second)
	o.Failures = cmp.Or(o.Failures, 3)
	o.Spec.Kind = cmp.Or(o.Spec.Kind, cdi.DefaultKind)
	o.Log = cmp.Or(o.Log, slog.Default())
	if o.newWatcher == nil {
		o.newWatcher = fsnotify.NewWatcher
	}
	if o.Path != "" {
		o.Path = filepath.Clean(o.Path)
	}
	library := o.Source.Library()
	i := &Inventory{
		opts:    o,
		log:     o.Log,
		file:    &specFile{path: o.Path, dirs: o.Dirs, kind: o.Spec.Kind, log: o.Log},
		extras:  newExtraFiles(&o),
		kick:    make(chan struct{}, 1),
		library: library,
		loaded:  fileid.Of(library),
	}
	i.beat.Store(time.Now().UnixNano())
	return i
}

// State is the last state that was published.
func (i *Inventory) State() State {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.state
}

// Kick asks for a reconcile soon: a driver event, a signal. It does not wait.
func (i *Inventory) Kick() {
	select {
	case i.kick <- struct{}{}:
	default: // one is asked for already
	}
}

// SpecHas reports, as an error that names them, the devices that the specs on disk do not have: GPUs and MIG devices,
// whose names are qualified or not, and extras, by qualified names. It asks no driver and, while nobody touches the files,
// reads nothing; a file that was touched is first put right.
func (i *Inventory) SpecHas(names ...string) error {
	var errs []error
	for _, e := range i.extras {
		var own []string
		own, names = e.split(names)
		if len(own) > 0 {
			errs = append(errs, e.file.has(own))
		}
	}
	return errors.Join(append(errs, i.file.has(names))...)
}
