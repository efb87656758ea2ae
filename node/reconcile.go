package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/resource"
)

// Start takes the first look and publishes it. Unlike later, whatever stands against giving GPUs to containers is an
// error, with an exit status and a hint: there is no driver, other spec files define the names of all devices, the spec
// cannot be written, the configuration does not fit the GPUs. A node without a GPU is not an error.
//
// After an error nothing is held; without one, Run must follow.
func (i *Inventory) Start(ctx context.Context) error {
	if err := i.acquire(); err != nil {
		return fmt.Errorf("keep the CDI spec: %w", err)
	}
	if err := i.start(ctx); err != nil {
		return errors.Join(err, i.release())
	}
	return nil
}

func (i *Inventory) start(ctx context.Context) error {
	began := time.Now()
	i.began = began
	i.beat.Store(began.UnixNano())
	i.print = i.fingerprint()
	next, err := i.look(ctx)
	if i.opts.AwaitDriver && exit.CodeOf(err) == exit.NoDriver && ctx.Err() == nil {
		return i.await(err)
	}
	if err != nil {
		return err
	}
	i.noteLoaded()
	there := cdi.Load(i.opts.Dirs...)
	if err := i.checkTaken(&next, there); err != nil {
		return err
	}
	missing := i.missing()
	written, err := i.sync(&next, there)
	i.observe(began, written, err)
	if err != nil {
		return errors.Join(err, removeAll(missing))
	}
	i.tellUnwanted()
	i.logClashes(&next)
	i.publish(i.judged(next))
	return nil
}

// await begins without a driver: no device is offered until there is one.
func (i *Inventory) await(cause error) error {
	resources, err := i.opts.Build(&gpu.Snapshot{})
	if err != nil {
		return fmt.Errorf("make the resources of a node without a driver: %w", err)
	}
	i.awaiting = true
	i.noteLoaded()
	i.log.Warn("there is no usable NVIDIA driver yet, and no device is offered until there is one: " + inLine(cause))
	i.publish(State{Snapshot: &gpu.Snapshot{}, Resources: resources, Err: cause})
	return nil
}

// noteLoaded notes which file the process has loaded, if its path is known only now.
func (i *Inventory) noteLoaded() {
	if i.loaded.IsZero() {
		i.library = i.opts.Source.Library()
		i.loaded = fileid.Of(i.library)
		i.print = i.fingerprint()
	}
}

// reconcile looks at the node and makes the spec and the list follow. The error is ErrDriverChanged or nil; any other
// is in the state.
func (i *Inventory) reconcile(ctx context.Context) error {
	began := time.Now()
	i.library = i.opts.Source.Library()
	i.print = i.fingerprint()
	err := i.checkDriver()
	if errors.Is(err, ErrDriverChanged) {
		return err
	}
	var next State
	if err == nil {
		next, err = i.look(ctx)
		i.noteLoaded()
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // who ends the inventory wants no more states
	}
	var written bool
	if err != nil {
		written = i.keep(err)
	} else {
		written, err = i.apply(next)
		i.removeUnwanted()
	}
	i.observe(began, written, err)
	return nil
}

// look is the state that the node should have. The Spec is nil where there is no device to offer.
func (i *Inventory) look(ctx context.Context) (State, error) {
	search := i.opts.Begun
	i.opts.Begun = nil
	if search == nil {
		search = cdi.Begin(i.opts.Host)
	}
	s, err := i.opts.Source.Snapshot(ctx)
	if err != nil {
		return State{}, &driverError{err}
	}
	s = remember(i.State().Snapshot, s)
	driver, err := search.Driver(s.DriverVersion)
	if err == nil {
		err = driver.Check(i.opts.Spec.Capabilities)
	}
	if err != nil {
		return State{}, err
	}
	i.logBroken(driver)
	spec, findings, err := cdi.Generate(s, driver, i.opts.Spec)
	if err != nil && !errors.Is(err, cdi.ErrNoDevices) {
		return State{}, err
	}
	resources, err := i.opts.Build(s)
	if err != nil {
		return State{}, fmt.Errorf("make the resources of the node's GPUs: %w", err)
	}
	extras, err := i.findExtras()
	if err != nil {
		return State{}, err
	}
	return State{Snapshot: s, Spec: spec, extras: extras, built: resources, notes: notes(s, findings)}, nil
}

// logBroken logs which libraries of the driver cannot be used, when that has changed.
func (i *Inventory) logBroken(driver *cdi.Driver) {
	now := map[string]bool{}
	for _, f := range driver.Explain(i.opts.Spec.Capabilities) {
		if !f.Broken {
			continue
		}
		name := cmp.Or(f.Path, f.Name)
		now[name] = true
		if !i.broken[name] {
			i.log.Warn("containers go without the driver library "+name+", which cannot be used: "+f.Note+
				"; install the NVIDIA driver again", "library", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(i.broken)) {
		if !now[name] {
			i.log.Info("the driver library "+name+" is no longer broken", "library", name)
		}
	}
	i.broken = now
}

// driverError is an error of a snapshot. Unlike the others it may pass by itself.
type driverError struct{ error }

func (e *driverError) Unwrap() error { return e.error }

// apply makes the spec and the list what they should be: first the list without what is gone or new, then the spec,
// then the list with what is new.
func (i *Inventory) apply(next State) (written bool, err error) {
	if i.failures > 0 || i.awaiting {
		i.log.Info("the GPUs can be read")
		i.failures, i.awaiting = 0, false
	}
	there := cdi.Load(i.opts.Dirs...)
	before := i.State()
	less := before
	less.Snapshot, less.built, less.notes = next.Snapshot, next.built, next.notes
	less.Resources = unhealthy(known(next.built, before.Resources), i.taken(there.Clashes(i.opts.Path, next.Spec)))
	less.Extras = i.stillThere(there, before.Extras, next.extras)
	i.publish(less)
	written, next.Err = i.sync(&next, there)
	switch {
	case sameText(next.Err, before.Err):
	case next.Err != nil:
		i.log.Error("the CDI spec is not what it should be, and devices that it concerns are unhealthy: " + inLine(next.Err))
	default:
		i.log.Info("the CDI spec is what it should be again")
	}
	i.logClashes(&next)
	i.publish(i.judged(next))
	return written, next.Err
}

// keep holds on to the last good state while the node cannot be read. Devices become unhealthy at once when containers
// could not start with them, since the driver's files are broken, and after some failures in a row when only the
// driver did not answer.
func (i *Inventory) keep(cause error) (written bool) {
	i.failures++
	next := i.State()
	var err error
	if !i.awaiting {
		written, err = i.sync(&next, cdi.Load(i.opts.Dirs...))
	}
	next.Err = errors.Join(cause, err)
	if !sameText(next.Err, i.State().Err) {
		i.log.Error("the GPUs cannot be read, and the last state is kept: "+inLine(next.Err), "failures", i.failures)
	}
	i.logClashes(&next)
	next = i.judged(next)
	_, passing := errors.AsType[*driverError](cause)
	if !passing || errors.Is(cause, ErrLasting) || i.failures >= i.opts.Failures {
		next.Resources = unhealthy(next.Resources, func(*resource.Device) string { return cause.Error() })
	}
	i.publish(next)
	return written
}

// judged is a state whose devices are healthy only if engines give containers what the spec says.
func (i *Inventory) judged(s State) State {
	offered, clashes := i.file.offers()
	why := i.taken(clashes)
	s.lost = i.ofDevices(clashes, s.built)
	s.Resources = unhealthy(s.built, func(d *resource.Device) string {
		switch {
		case s.extrasErr != nil:
			return s.extrasErr.Error()
		case offered[d.CDIName(i.opts.ByIndex)]:
			return ""
		case s.notes[d.UUID] != "":
			return s.notes[d.UUID]
		case why(d) != "":
			return why(d)
		case s.Err != nil:
			return s.Err.Error()
		default:
			return "not in the CDI spec"
		}
	})
	return s
}

// publish makes s the state. What is in it as before is the same as before, so that who keeps what he made of a spec sees
// that it is right still.
func (i *Inventory) publish(s State) {
	i.mu.Lock()
	before := &i.state
	sameSpec, sameExtras := reflect.DeepEqual(s.Spec, before.Spec), reflect.DeepEqual(s.Extras, before.Extras)
	if sameSpec {
		s.Spec = before.Spec
	}
	if sameExtras {
		s.Extras = before.Extras
	}
	same := sameSpec && sameExtras && before.Snapshot != nil && reflect.DeepEqual(s.Snapshot.Links, before.Snapshot.Links) &&
		sameText(s.Err, before.Err) && reflect.DeepEqual(s.Resources, before.Resources)
	i.state = s
	i.mu.Unlock()
	if !same {
		i.opts.Publish(s)
	}
}

func (i *Inventory) observe(began time.Time, written bool, err error) {
	if i.opts.Observer != nil {
		i.opts.Observer.Reconciled(time.Since(began), written, err)
	}
}

// inLine is an error in one line, for the log.
func inLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func sameText(a, b error) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return a.Error() == b.Error()
}

// notes are what the generator says of the devices that it left out, by UUID. Its findings are in the snapshot's
// order, one for each GPU, or for each MIG device of a GPU that has some.
func notes(s *gpu.Snapshot, findings []cdi.Finding) map[string]string {
	m := map[string]string{}
	next := func(uuid string) {
		if len(findings) > 0 {
			m[uuid], findings = findings[0].Note, findings[1:]
		}
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		if !d.Usable() || !d.MIGEnabled || len(d.MIG) == 0 {
			next(d.UUID)
			continue
		}
		for j := range d.MIG {
			next(d.MIG[j].UUID)
		}
	}
	return m
}
