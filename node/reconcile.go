package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/resource"
)

// desired is what the node has and what should be on disk.
type desired struct {
	snapshot  *gpu.Snapshot
	spec      *specs.Spec   // nil without a device
	extras    []*specs.Spec // of the extras that the node has
	resources []resource.Resource
	leftOut   map[string]string // why devices are not in the spec, by UUID
}

// applied is the result of writing a desired state.
type applied struct {
	written     bool
	offered     map[string]bool // the qualified names that engines take from our specs with the desired edits
	conflicts   []cdi.Conflict  // the desired names that other spec files define too
	err         error           // why a spec is not as desired
	requiredErr error           // why containers do not get a required extra

	descriptors   map[string]error // why devices have no descriptor, by UUID
	descriptorErr error            // all of that
}

// Start reconciles for the first time and publishes the result. Unlike later, whatever keeps GPUs from being given to
// containers is an error: there is no driver (gpu.ErrNoDriver), other spec files define the names of all devices
// (TakenError), a spec cannot be written (SpecError), the configuration does not fit the GPUs. A node without a GPU is
// not an error.
//
// After an error no lock is held. Otherwise Run must follow.
func (r *Reconciler) Start(ctx context.Context) error {
	if err := r.acquire(); err != nil {
		return fmt.Errorf("reconcile the node: %w", err)
	}
	if err := r.start(ctx); err != nil {
		return errors.Join(err, r.release())
	}
	return nil
}

func (r *Reconciler) start(ctx context.Context) error {
	began := time.Now()
	r.heartbeat.Store(began.UnixNano())
	r.fingerprint = r.hostFingerprint()
	next, err := r.scan(ctx)
	if r.opts.AwaitDriver && errors.Is(err, gpu.ErrNoDriver) && ctx.Err() == nil {
		return r.awaitDriver(err)
	}
	if err != nil {
		return err
	}
	r.noteLoadedLibrary()
	specDirs := cdi.Load(r.opts.Dirs...)
	if err := r.checkTaken(next, specDirs); err != nil {
		return err
	}
	missing := r.missingFiles()
	r.applied = r.applySpecs(next, specDirs)
	if r.applied.err != nil {
		r.observe(began, r.applied.written, r.applied.err)
		return errors.Join(r.applied.err, removeFiles(missing))
	}
	r.applyDescriptors(next)
	r.observe(began, r.applied.written, r.applied.failure())
	r.logUnconfiguredExtras()
	r.logConflicts(next)
	r.desired = next
	r.publish(r.newState(next))
	return nil
}

// awaitDriver publishes the resources without devices. The specs on disk stay as they are until there is a driver.
func (r *Reconciler) awaitDriver(cause error) error {
	resources, err := r.opts.Build(&gpu.Snapshot{})
	if err != nil {
		return fmt.Errorf("make the resources of a node without a driver: %w", err)
	}
	r.noteLoadedLibrary()
	r.logUnconfiguredExtras()
	r.log.Warn("there is no usable NVIDIA driver yet, and no device is offered until there is one: " + oneLine(cause))
	r.publish(State{Snapshot: &gpu.Snapshot{}, Resources: resources, Err: cause})
	return nil
}

// noteLoadedLibrary notes which file the process has loaded, if its path was unknown before.
func (r *Reconciler) noteLoadedLibrary() {
	if r.loaded.IsZero() {
		r.library = r.opts.Source.Library()
		r.loaded = fileid.Of(r.library)
	}
}

// reconcile makes the files and the published state what the node has. It returns ErrDriverChanged or nil; any other
// error is in the state.
func (r *Reconciler) reconcile(ctx context.Context) error {
	began := time.Now()
	restored := r.restore()
	r.library = r.opts.Source.Library()
	r.fingerprint = r.hostFingerprint()
	err := r.checkDriver()
	if errors.Is(err, ErrDriverChanged) {
		return err
	}
	var next *desired
	if err == nil {
		next, err = r.scan(ctx)
		r.noteLoadedLibrary()
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // no state is published after the end
	}
	if err != nil {
		r.retain(err)
	} else {
		err = r.follow(next)
	}
	r.observe(began, restored || r.applied.written, err)
	return nil
}

// restore writes the last desired state again if a file has changed, and reports whether it wrote a spec. It does not
// wait for the driver, which may take seconds to answer. No device becomes healthier by it.
func (r *Reconciler) restore() (written bool) {
	if r.desired == nil || !r.changed() {
		return false
	}
	specDirs, before := cdi.Load(r.opts.Dirs...), r.State()
	r.publish(r.intermediate(r.desired, before, specDirs))
	r.apply(r.desired, specDirs)
	next := r.newState(r.desired)
	next.Resources, next.Err = onlyPublished(next.Resources, before.Resources), before.Err
	r.publish(next)
	return r.applied.written
}

// scan reads the node and returns the desired state.
func (r *Reconciler) scan(ctx context.Context) (*desired, error) {
	if r.opts.Check != nil {
		if err := r.opts.Check(); err != nil {
			return nil, err
		}
	}
	search := r.opts.Search
	r.opts.Search = nil
	if search == nil {
		search = driver.Begin(r.opts.Host)
	}
	snapshot, err := r.opts.Source.Snapshot(ctx)
	if err != nil {
		return nil, &snapshotError{err}
	}
	files, err := search.Driver(snapshot.DriverVersion)
	if err == nil {
		err = files.Check(r.opts.Spec.Capabilities)
	}
	if err != nil {
		return nil, err
	}
	r.logBrokenLibraries(files)
	spec, findings, err := cdi.Generate(snapshot, files, r.opts.Spec)
	if err != nil {
		return nil, err
	}
	if len(spec.Devices) == 0 {
		spec = nil
	}
	resources, err := r.opts.Build(snapshot)
	if err != nil {
		return nil, fmt.Errorf("make the resources of the node's GPUs: %w", err)
	}
	extras, err := r.findExtras()
	if err != nil {
		return nil, err
	}
	return &desired{snapshot, spec, extras, resources, notes(findings)}, nil
}

// snapshotError is an error of a snapshot. Unlike the others it may pass by itself.
type snapshotError struct{ error }

func (e *snapshotError) Unwrap() error { return e.error }

// follow first takes devices back that are gone, then writes the files, then publishes new devices. So a published
// device is in the spec at any time.
func (r *Reconciler) follow(next *desired) error {
	if r.failures > 0 || r.desired == nil {
		r.log.Info("the node can be reconciled again")
		r.failures = 0
	}
	specDirs := cdi.Load(r.opts.Dirs...)
	before := r.State()
	r.publish(r.intermediate(next, before, specDirs))
	r.desired = next
	r.apply(next, specDirs)
	switch err := r.applied.failure(); {
	case sameText(err, before.Err):
	case err != nil:
		r.log.Error("a CDI spec or descriptor is not up to date, and its devices are unhealthy: " + oneLine(err))
	default:
		r.log.Info("the CDI specs and descriptors are up to date again")
	}
	r.logConflicts(next)
	r.publish(r.newState(next))
	return r.applied.failure()
}

// retain keeps the last desired state while the node cannot be read. Devices are unhealthy at once if containers could
// not start with them, since the driver's files are broken, and after some consecutive failures if only the driver did
// not answer.
func (r *Reconciler) retain(cause error) {
	r.failures++
	before := r.State()
	next := before
	if r.desired != nil {
		r.apply(r.desired, cdi.Load(r.opts.Dirs...))
		r.logConflicts(r.desired)
		next = r.newState(r.desired)
	}
	next.Err = errors.Join(cause, r.applied.failure())
	if !sameText(next.Err, before.Err) {
		r.log.Error("the node cannot be reconciled, and the last state is retained: "+oneLine(next.Err),
			"failures", r.failures)
	}
	_, passing := errors.AsType[*snapshotError](cause)
	if !passing || errors.Is(cause, gpu.ErrNotAnswering) || r.failures >= r.opts.Failures {
		next.Resources = resource.MarkUnhealthy(next.Resources, func(*resource.Device) string { return cause.Error() })
	}
	r.publish(next)
}

// apply writes the specs, beside the other spec files, and the descriptors.
func (r *Reconciler) apply(want *desired, specDirs *cdi.SpecDirs) {
	r.applied = r.applySpecs(want, specDirs)
	r.applyDescriptors(want)
}

func (r *Reconciler) applyDescriptors(want *desired) {
	r.applied.descriptors, r.applied.descriptorErr = r.descriptors.apply(want.resources, uuidsOf(want.snapshot))
}

func (r *Reconciler) applySpecs(want *desired, specDirs *cdi.SpecDirs) applied {
	a := applied{offered: map[string]bool{}}
	for _, e := range r.extras {
		spec := specOf(want.extras, e.file.kind)
		err := a.add(e.file.apply(spec, specDirs))
		if e.Required && err == nil {
			err = e.checkOffered(spec, &a)
		}
		if e.Required {
			a.requiredErr = cmp.Or(a.requiredErr, err)
		}
		a.err = cmp.Or(a.err, err)
	}
	a.err = cmp.Or(a.add(r.spec.apply(want.spec, specDirs)), a.err)
	return a
}

// add adds the result of writing a spec file.
func (a *applied) add(f appliedSpec) error {
	a.written = a.written || f.written
	a.conflicts = append(a.conflicts, f.conflicts...)
	maps.Copy(a.offered, f.offered)
	return f.err
}

// failure joins the errors of the specs and of the descriptors.
func (a *applied) failure() error { return errors.Join(a.err, a.descriptorErr) }

// newState is the state after d was applied, by r.applied. A device is healthy in it if it is in the snapshot, engines
// take it from our spec, and it has its descriptor.
func (r *Reconciler) newState(d *desired) State {
	a := &r.applied
	taken := r.takenBy(a.conflicts)
	resources := resource.MarkUnhealthy(d.resources, func(dev *resource.Device) string {
		descriptorErr := a.descriptors[dev.UUID]
		switch offered := a.offered[r.qualified(dev)]; {
		case a.requiredErr != nil:
			return a.requiredErr.Error()
		case offered && descriptorErr == nil:
			return ""
		case offered:
			return descriptorErr.Error()
		case d.leftOut[dev.UUID] != "":
			return d.leftOut[dev.UUID]
		case taken(dev) != "":
			return taken(dev)
		case a.err != nil:
			return a.err.Error()
		default:
			return "not in the CDI spec"
		}
	})
	return State{
		Snapshot: d.snapshot, Spec: d.spec, Resources: r.withGrants(resources, d, a.offered), Err: a.failure(),
		taken: linesByFile(r.ofDevices(a.conflicts, d.resources)),
	}
}

// intermediate is the state before the files are written: of the next devices those that are published already, and not
// healthier than before.
func (r *Reconciler) intermediate(next *desired, before State, specDirs *cdi.SpecDirs) State {
	taken, named := r.takenBy(specDirs.Conflicts(r.opts.Path, next.spec)), qualifiedNames(next.spec)
	resources := resource.MarkUnhealthy(onlyPublished(next.resources, before.Resources),
		func(d *resource.Device) string {
			if !named[r.qualified(d)] {
				return cmp.Or(next.leftOut[d.UUID], "not in the CDI spec")
			}
			return taken(d)
		})
	offered := maps.Clone(r.applied.offered)
	for _, e := range r.extras {
		for _, c := range specDirs.Conflicts(e.file.path, specOf(next.extras, e.file.kind)) {
			if c.Unavailable() {
				delete(offered, c.Name)
			}
		}
	}
	s := before
	s.Snapshot, s.Resources = next.snapshot, r.withGrants(resources, next, offered)
	return s
}

// publish makes s the state, and passes it on if it differs from the one before.
func (r *Reconciler) publish(s State) {
	r.mu.Lock()
	before := r.state
	r.state = s
	r.mu.Unlock()
	same := before.Snapshot != nil && reflect.DeepEqual(s.Snapshot, before.Snapshot) &&
		sameText(s.Err, before.Err) && slices.Equal(s.taken, before.taken) &&
		reflect.DeepEqual(s.Resources, before.Resources)
	if !same {
		r.opts.Publish(s)
	}
}

func (r *Reconciler) observe(began time.Time, written bool, err error) {
	if r.opts.Observer != nil {
		r.opts.Observer.Reconciled(time.Since(began), written, err)
	}
}

// logBrokenLibraries logs which libraries of the driver cannot be used, when that changes.
func (r *Reconciler) logBrokenLibraries(files *driver.Driver) {
	now := map[string]bool{}
	for _, f := range files.Explain(r.opts.Spec.Capabilities) {
		if !f.Broken {
			continue
		}
		name := cmp.Or(f.Path, f.Name)
		now[name] = true
		if !r.broken[name] {
			r.log.Warn("containers go without the driver library "+name+", which cannot be used: "+f.Note+
				"; install the NVIDIA driver again", "library", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.broken)) {
		if !now[name] {
			r.log.Info("the driver library "+name+" is no longer broken", "library", name)
		}
	}
	r.broken = now
}

// specFiles are the spec files of the GPUs and of the extras.
func (r *Reconciler) specFiles() []*specFile {
	list := []*specFile{r.spec}
	for _, e := range r.extras {
		list = append(list, e.file)
	}
	return list
}

// owns reports whether the file is one of the reconciler's specs.
func (r *Reconciler) owns(path string) bool {
	return slices.ContainsFunc(r.specFiles(), func(f *specFile) bool { return f.path == path })
}

// missingFiles are the paths of the spec files that do not exist.
func (r *Reconciler) missingFiles() []string {
	var list []string
	for _, f := range r.specFiles() {
		if f.path != "" && fileid.Of(f.path).IsZero() {
			list = append(list, f.path)
		}
	}
	return list
}

// oneLine is an error in one line, for the log.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func sameText(a, b error) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return a.Error() == b.Error()
}

// notes are the reasons of the generator for leaving devices out, by UUID.
func notes(findings []driver.Finding) map[string]string {
	m := map[string]string{}
	for _, f := range findings {
		m[f.UUID] = f.Note
	}
	return m
}

// fileIn is the path of a kind's spec beside the GPUs' spec, or empty without one.
func fileIn(o *Options, kind string) string {
	if o.Path == "" {
		return ""
	}
	return filepath.Join(filepath.Dir(o.Path), cdi.FileName(kind))
}
