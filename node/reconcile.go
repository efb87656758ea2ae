package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
)

// Start reconciles for the first time and publishes the result. Unlike later reconciliations, it returns an error if
// containers cannot get GPUs: there is no driver (gpu.ErrNoDriver), other spec files define the names of all devices
// (TakenError), a spec cannot be written (SpecError), or the configuration does not fit the GPUs. A host without GPUs
// is not an error.
//
// From then on, the function `publish` is called with each changed state, in order. When it returns, the state must be
// in effect.
//
// After an error no lock is held. Otherwise the caller must call Run, and then Unlock.
func (r *Reconciler) Start(ctx context.Context, publish func(State)) error {
	r.publishTo = publish
	if err := r.Lock(); err != nil {
		return err
	}
	if err := r.start(ctx); err != nil {
		return errors.Join(err, r.Unlock())
	}
	return nil
}

// Scan reads the node for Start, so that Start need not, and writes nothing. The error is one that Start would return,
// or gpu.ErrNoDriver.
func (r *Reconciler) Scan(ctx context.Context) (err error) {
	r.reconciled, r.seen = time.Now(), r.identify()
	r.scanned, err = r.scan(ctx, nil)
	return err
}

// ForgetScan drops what Scan has read, since the node may change before Start.
func (r *Reconciler) ForgetScan() { r.scanned = nil }

func (r *Reconciler) start(ctx context.Context) error {
	began := time.Now()
	r.heartbeat.Store(began.UnixNano())
	want, err := r.scanned, error(nil)
	if want == nil {
		r.reconciled, r.seen = began, r.identify()
		want, err = r.scan(ctx, r.opts.Search)
	}
	if r.opts.AwaitDriver && errors.Is(err, gpu.ErrNoDriver) && ctx.Err() == nil {
		return r.awaitDriver(err)
	}
	if err != nil {
		return err
	}
	r.monitor.setDevices(want.snapshot) // at once, since XIDs of new GPUs wait for it
	r.seeDriver(want.driverDirs)
	p := r.newPlan(want, r.loadSpecs())
	if err := r.checkTaken(p); err != nil {
		return err
	}
	r.writeSpecs(p)
	if err := p.specErr(); err != nil {
		r.observe(began, p.written, err)
		return errors.Join(err, p.removeCreated())
	}
	r.writeDescriptors(p)
	r.observe(began, p.written, p.err())
	r.plan = p
	r.publish(r.stateOf(p))
	return nil
}

// awaitDriver publishes the resources without devices. The specs on disk stay unchanged until there is a driver.
func (r *Reconciler) awaitDriver(cause error) error {
	resources, _, err := r.opts.Build(&gpu.Snapshot{})
	if err != nil {
		return fmt.Errorf("make the resources of a node without a driver: %w", err)
	}
	r.publish(State{
		Snapshot: &gpu.Snapshot{}, Resources: resources, Err: cause, remarks: []Remark{r.notReconciled(cause)},
	})
	return nil
}

// notReconciled returns the remark about an error of a scan.
func (r *Reconciler) notReconciled(cause error) Remark {
	if r.plan == nil && errors.Is(cause, gpu.ErrNoDriver) { // like a host without GPUs
		m := newRemark("scan", "there is no usable NVIDIA driver yet, and no device is offered until there is one", cause)
		m.Level = slog.LevelWarn
		return m
	}
	return newRemark("scan", "the node cannot be reconciled, and the last state is retained", cause)
}

// reconcile brings the files and the published state up to date. It returns ErrDriverChanged or nil; any other error
// is in the state.
func (r *Reconciler) reconcile(ctx context.Context) error {
	began := time.Now()
	r.heartbeat.Store(began.UnixNano())
	r.resting = false
	written := r.rewriteFiles()
	r.findLibrary()
	r.reconciled, r.seen = began, r.identify()
	if r.plan != nil && r.opts.Source.Released() { // the driver may be unloaded or replaced meanwhile
		written = r.reoffer() || written
		if r.failures == 0 {
			r.publish(r.stateOf(r.plan))
		}
		r.observe(began, written, r.plan.err())
		return nil
	}
	want, err := r.checkAndScan(ctx)
	if errors.Is(err, ErrDriverChanged) {
		return err
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // no state is published after the end
	}
	if err != nil {
		r.retain(err)
	} else {
		r.failures = 0
		r.seeDriver(want.driverDirs)
		r.writePlan(want)
		r.publish(r.stateOf(r.plan))
		written, err = written || r.plan.written, r.plan.err()
	}
	r.observe(began, written, err)
	return nil
}

// reoffer brings the plan up to date if a reload has changed which devices are offered, and reports whether it wrote a
// spec. It does not read the node.
func (r *Reconciler) reoffer() (written bool) {
	resources, _, err := r.opts.Build(r.plan.snapshot)
	if err != nil || reflect.DeepEqual(resources, r.plan.resources) {
		return false // a reload has checked the offer
	}
	want := *r.plan.desired
	want.resources = resources
	r.writePlan(&want)
	return r.plan.written
}

func (r *Reconciler) checkAndScan(ctx context.Context) (*desired, error) {
	if err := r.checkDriver(); err != nil {
		return nil, err
	}
	return r.scan(ctx, nil)
}

// writePlan writes the files of the desired state. Before that it publishes a state without the devices that are gone.
// The caller publishes new devices after that. So a published device is in the spec at any time.
func (r *Reconciler) writePlan(want *desired) {
	r.monitor.setDevices(want.snapshot)
	p := r.newPlan(want, r.loadSpecs())
	r.publish(r.stateBetween(r.State(), p))
	r.writeSpecs(p)
	r.writeDescriptors(p)
	r.plan = p
}

func (r *Reconciler) writeDescriptors(p *plan) {
	p.descriptorErrs, p.descriptorErr = r.descriptors.write(p.descriptors, uuidsOf(p.snapshot))
	if r.descriptors.dir != "" {
		maps.DeleteFunc(r.seen, func(path string, _ fileio.ID) bool { return filepath.Dir(path) == r.descriptors.dir })
		for uuid := range p.descriptors {
			r.see(r.descriptors.path(uuid))
		}
	}
}

// rewriteFiles writes the last desired state again if a file was changed or could not be written, and reports whether
// it wrote a spec. It does not wait for the driver, which may take seconds to answer. It makes no device healthier.
func (r *Reconciler) rewriteFiles() (written bool) {
	if r.plan == nil || !r.changed() && r.plan.err() == nil {
		return false
	}
	r.writePlan(r.plan.desired)
	r.publish(r.stateBetween(r.State(), r.plan)) // without what could not be written
	return r.plan.written
}

// retain keeps the last desired state while the node cannot be read. If the driver's files are broken, or the driver
// has not answered for too long, the devices become unhealthy at once; otherwise they do after maxFailures failed
// snapshots.
func (r *Reconciler) retain(cause error) {
	r.failures++
	next := r.State().withoutHealth()
	if r.plan != nil {
		next = r.stateOf(r.plan)
		next.Err = errors.Join(cause, next.Err)
		next.remarks = append([]Remark{r.notReconciled(cause)}, next.remarks...)
	} else {
		next.Err, next.remarks = cause, []Remark{r.notReconciled(cause)}
	}
	_, mayPass := errors.AsType[*snapshotError](cause)
	if !mayPass || errors.Is(cause, gpu.ErrNotAnswering) || r.failures >= maxFailures {
		next.Resources = resource.MarkUnhealthy(next.Resources, func(*resource.Device) string { return cause.Error() })
	}
	r.publish(next)
}

// scan reads the node and returns the desired state. `search` is a search for the driver's files that has begun; if it
// is nil, scan starts one.
func (r *Reconciler) scan(ctx context.Context, search *driver.Search) (*desired, error) {
	if r.opts.Check != nil {
		if err := r.opts.Check(); err != nil {
			return nil, err
		}
	}
	if search == nil {
		search = driver.Begin(r.opts.Host)
	}
	snapshot, err := r.opts.Source.Snapshot(ctx)
	if err != nil {
		return nil, &snapshotError{err}
	}
	files, err := search.Driver(snapshot.DriverVersion)
	if err != nil {
		return nil, err
	}
	if err := files.Check(r.opts.Spec.Capabilities); err != nil {
		return nil, err
	}
	spec, findings, err := cdi.Generate(snapshot, files, r.opts.Spec)
	if err != nil {
		return nil, err
	}
	resources, ofResources, err := r.opts.Build(snapshot)
	if err != nil {
		return nil, fmt.Errorf("make the resources of the node's GPUs: %w", err)
	}
	want := &desired{
		snapshot: snapshot, specs: map[string]*specs.Spec{}, resources: resources, leftOut: map[string]string{},
		remarks: slices.Concat(lacking(slices.Concat(files.Explain(r.opts.Spec.Capabilities), findings)),
			noGPU(snapshot), asRemarks(ofResources)),
		driverDirs: dirsOf(files),
	}
	if len(spec.Devices) > 0 {
		want.specs[spec.Kind] = spec
	}
	if r.opts.WithoutCDI {
		o := r.opts.Spec
		o.WithoutHooks = true
		if want.hookless, _, err = cdi.Generate(snapshot, files, o); err != nil {
			return nil, err
		}
	}
	for _, f := range findings {
		want.leftOut[f.UUID] = f.Note
	}
	if err := r.addExtras(want); err != nil {
		return nil, err
	}
	want.remarks = append(want.remarks, r.unconfiguredExtras()...)
	return want, nil
}

// dirsOf returns the directories of the driver's files on the host, without those of sockets.
func dirsOf(d *driver.Driver) []string {
	var dirs []string
	for _, l := range d.Libraries {
		dirs = append(dirs, filepath.Dir(l.HostPath))
	}
	for _, f := range d.Files {
		if f.Kind != driver.KindSocket {
			dirs = append(dirs, filepath.Dir(f.HostPath))
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// lacking returns remarks on what containers need and do not get.
func lacking(findings []driver.Finding) []Remark {
	var list []Remark
	for i := range findings {
		if f := &findings[i]; f.Broken || f.Missing != "" {
			text, advice := f.Lack()
			list = append(list, Remark{
				Key: cmp.Or(f.UUID, f.Path, f.Name), Level: slog.LevelWarn, Text: text, Advice: advice,
			})
		}
	}
	return list
}

// noGPU returns a remark if the node has no GPU.
func noGPU(s *gpu.Snapshot) []Remark {
	if len(s.Devices) > 0 {
		return nil
	}
	return []Remark{{
		Key: "no GPU", Level: slog.LevelWarn, Text: "the NVIDIA driver has no GPU, and no device is offered",
		Advice: "see whether lspci -d 10de: lists a GPU, and the kernel log (dmesg) for messages of NVRM",
	}}
}

// asRemarks converts the findings about the resources.
func asRemarks(findings []resource.Finding) []Remark {
	var list []Remark
	for _, f := range findings {
		m := Remark{Key: f.Text, Text: f.Text}
		if f.Severe {
			m.Level = slog.LevelWarn
		}
		list = append(list, m)
	}
	return list
}

// maxFailures is the number of consecutive failed snapshots after which the devices are unhealthy.
const maxFailures = 3

// snapshotError is an error of a snapshot. Unlike other errors of a scan it may be temporary.
type snapshotError struct{ error }

func (e *snapshotError) Unwrap() error { return e.error }

// publish publishes s, with the health of the devices, unless that equals the previous state.
func (r *Reconciler) publish(s State) {
	r.publishing.Lock()
	defer r.publishing.Unlock()
	r.publishWithHealth(s)
}

// republish publishes the last state with the devices' current health.
func (r *Reconciler) republish() {
	r.publishing.Lock()
	defer r.publishing.Unlock()
	if s := r.State(); s.Snapshot != nil {
		r.publishWithHealth(s.withoutHealth())
	}
}

// SetInUse marks a device as in use although no container holds it, by these processes as far as they are known. The
// reason is part of a sentence; an empty reason removes the mark. A device that is otherwise healthy is suspect while
// it is marked. Before that is published, the use is written for a device manager.
func (r *Reconciler) SetInUse(uuid, reason string, pids []int) {
	transitions, status := r.monitor.setInUse(uuid, reason)
	if !status.InUse {
		reason = ""
	}
	r.writeUse(uuid, deviceUse{reason, pids})
	r.monitor.report(transitions)
}

func (r *Reconciler) writeUse(uuid string, use deviceUse) {
	if err := r.descriptors.writeUse(uuid, use); err != nil {
		r.log.Debug("a device manager does not learn what uses " + uuid + ": " + err.Error())
	}
}

// InUse reports whether SetInUse has marked a device. Marks survive a restart.
func (r *Reconciler) InUse(uuid string) bool { return r.monitor.inUse(uuid) }

func (r *Reconciler) publishWithHealth(s State) {
	s = r.monitor.withHealth(s)
	r.mu.Lock()
	before := r.state
	r.state = s
	r.mu.Unlock()
	for uuid, h := range s.Health {
		if !h.InUse { // or no longer only that
			r.writeUse(uuid, deviceUse{})
		}
	}
	LogRemarks(r.log, before.remarks, s.remarks)
	same := before.Snapshot != nil && reflect.DeepEqual(s.Snapshot, before.Snapshot) &&
		slices.Equal(s.remarks, before.remarks) && reflect.DeepEqual(s.Resources, before.Resources) &&
		maps.EqualFunc(s.Health, before.Health, sameHealth) // includes devices that are not offered
	if !same {
		r.publishTo(s)
	}
}

// sameHealth reports whether two statuses are equal, apart from the counts of XIDs.
func sameHealth(a, b health.Status) bool { return a.State == b.State && a.String() == b.String() }

func (r *Reconciler) observe(began time.Time, written bool, err error) {
	if r.opts.Observer != nil {
		r.opts.Observer.Reconciled(time.Since(began), written, err)
	}
}

// fileIn returns the path of the spec of a kind, beside the GPUs' spec, or "" if no spec is written.
func fileIn(o *Options, kind string) string {
	if o.Path == "" {
		return ""
	}
	return filepath.Join(filepath.Dir(o.Path), cdi.FileName(kind))
}
