// Package node reconciles a node: the GPUs that it has, the CDI specs and device descriptors on disk, and the devices
// that can be given to containers.
//
// A Reconciler scans the node when something has changed (the CDI directories, the driver's files, the device nodes),
// when it is triggered, and at an interval of at most 30 seconds. Each time it computes the desired state, compares it
// with the files on disk, writes the difference, and publishes the resulting State. A device is healthy in that state if
// engines take it from the spec on disk with the desired edits: a new device is published after the spec has it, and a
// device that is gone leaves the published state before the spec loses it.
//
// The package reads the GPUs through a Source. A door reads the published state and nothing else of the node.
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
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// Source reads the node's GPUs.
type Source interface {
	// Snapshot returns every GPU, an unreadable one with its error. An error concerns the driver as a whole.
	Snapshot(ctx context.Context) (*gpu.Snapshot, error)
	// Library is the path of the driver's library that would be loaded now, or empty if it is unknown.
	Library() string
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
	// Build returns the resources of a snapshot.
	Build func(*gpu.Snapshot) ([]resource.Resource, error)
	// Publish gets each state that differs from the one before, in order. It returns when the state is in effect.
	Publish func(State)
	// Search is a search for the driver's files that has begun already, for the first reconciliation; nil begins one
	// then.
	Search *driver.Search
	// AwaitDriver makes Start succeed on a node without a usable driver; Run waits for one.
	AwaitDriver bool
	// Interval is the longest time between the starts of two reconciliations; 0 is 30 seconds.
	Interval time.Duration
	// Poll is how often the host's files are compared with the last fingerprint; 0 is a second. MIG changes are noticed
	// this way alone, as is everything else where the user's inotify instances are used up.
	Poll time.Duration
	// Failures is the number of consecutive failed reconciliations after which the devices are unhealthy; 0 is 3.
	Failures int
	// Log gets what happens; nil is the default logger.
	Log *slog.Logger
	// Observer may be nil.
	Observer Observer

	newWatcher func() (*fsnotify.Watcher, error) // for tests
}

// State is what the node has and offers. It is not changed after it was published.
type State struct {
	// Snapshot is the last one that could be taken. A GPU that stopped answering keeps its UUID in it.
	Snapshot *gpu.Snapshot
	// Spec is the desired CDI spec, or nil without a device.
	Spec *specs.Spec
	// Resources are the devices on offer, with what a container gets for each. A device is healthy only if containers
	// can be given it.
	Resources []resource.Resource
	// Err is why the state is not the desired one, or nil. It does not concern names that other spec files define.
	Err error

	// taken has a line for each other spec file that makes devices unhealthy.
	taken []string
}

// Remarks are the reasons, a line each, for which some devices cannot be given to containers while others can.
func (s *State) Remarks() []string {
	var lines []string
	if s.Err != nil {
		lines = append(lines, s.Err.Error())
	}
	return append(lines, s.taken...)
}

// Ready returns an error before a state was published, and if the node has devices and none can be given to containers
// because of the spec files or of the driver as a whole.
func (s *State) Ready() error {
	if s.Snapshot == nil {
		return errors.New("the GPUs have not been read yet")
	}
	remarks := s.Remarks()
	hasDevices := slices.ContainsFunc(s.Resources, func(r resource.Resource) bool { return len(r.Devices) > 0 })
	if !hasDevices || len(remarks) == 0 || countHealthy(s.Resources) > 0 {
		return nil
	}
	return fmt.Errorf("no device can be given to containers: %s", strings.Join(remarks, "; "))
}

// Reconciler is the actor that reconciles the node. Call Start once, then Run once.
type Reconciler struct {
	opts        Options
	log         *slog.Logger
	spec        *specFile
	extras      []*extraFile // in the order of the options
	descriptors *descriptors
	trigger     wake.Chan
	heartbeat   atomic.Int64 // when Run last continued, in Unix nanoseconds

	mu    sync.Mutex
	state State // the last that was published

	// The goroutine of Start, and then of Run, alone uses what follows.
	desired     *desired        // the last that could be computed; nil until the node has had a driver
	applied     applied         // what came of writing it
	library     string          // the path of the driver's library at the last reconciliation
	loaded      fileid.ID       // that file when the process loaded it
	failures    int             // consecutive failed reconciliations
	broken      map[string]bool // the unusable driver libraries that were logged
	fingerprint uint64          // of the host's files at the last reconciliation
	logged      []cdi.Conflict  // the conflicts that were logged
}

// New returns a Reconciler. Call it before the driver's library is loaded: it notes which file that is, so that a
// replaced driver is noticed.
func New(o Options) *Reconciler {
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
	r := &Reconciler{
		opts:        o,
		log:         o.Log,
		spec:        &specFile{path: o.Path, dirs: o.Dirs, kind: o.Spec.Kind, log: o.Log},
		extras:      newExtraFiles(&o),
		descriptors: &descriptors{dir: o.DescriptorDir},
		trigger:     wake.New(),
		library:     library,
		loaded:      fileid.Of(library),
	}
	r.heartbeat.Store(time.Now().UnixNano())
	return r
}

// State is the last state that was published.
func (r *Reconciler) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// Trigger asks for a reconciliation soon. It does not wait for it.
func (r *Reconciler) Trigger() { r.trigger.Wake() }

// locks are the files that keep a second instance from writing the same specs and descriptors.
func (r *Reconciler) locks() []*fileLock {
	list := []*fileLock{&r.descriptors.fileLock}
	for _, f := range r.specFiles() {
		list = append(list, &f.fileLock)
	}
	return list
}

// acquire takes all locks. After an error none is held.
func (r *Reconciler) acquire() error {
	for _, f := range r.specFiles() {
		if err := f.acquire(); err != nil {
			return errors.Join(err, r.release())
		}
	}
	if err := r.descriptors.acquire(); err != nil {
		return errors.Join(err, r.release())
	}
	return nil
}

func (r *Reconciler) release() error {
	var errs []error
	for _, l := range r.locks() {
		errs = append(errs, l.release())
	}
	return errors.Join(errs...)
}

// fileLock is a lock that may not be held.
type fileLock struct{ lock *lock.Lock }

func (l *fileLock) release() error {
	if l.lock == nil {
		return nil
	}
	err := l.lock.Release()
	l.lock = nil
	return err
}
