package node

import (
	"cmp"
	"errors"
	"maps"
	"reflect"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// desired is what the node has and what should be on disk: the result of a scan.
type desired struct {
	snapshot  *gpu.Snapshot
	specs     map[string]*specs.Spec // by kind, without those that would have no device
	resources []resource.Resource
	leftOut   map[string]string // why devices are not in the spec, by UUID
	remarks   []remark
}

// plan is a desired state beside the other spec files: what to write, and what engines then take from it. Writing it
// adds what could not be written.
type plan struct {
	*desired
	files       []plannedFile          // as those of the Reconciler
	descriptors map[string]*Descriptor // by UUID

	written        bool             // a spec was written or removed
	descriptorErrs map[string]error // why devices have no descriptor, by UUID
	descriptorErr  error            // all of that
}

// plannedFile is a spec file with what it should have.
type plannedFile struct {
	*specFile
	spec      *specs.Spec     // the desired one, or nil
	conflicts []cdi.Conflict  // the names of spec that other files define too
	content   *specs.Spec     // spec without the names that are left to other files; nil removes the file
	old       *specs.Spec     // what the file has, or nil if that is no spec
	offered   map[string]bool // the qualified names that engines take from the file with the desired edits
	unchanged map[string]bool // those that they take if the file stays as it is
	err       error           // why the file is not as desired
	created   bool            // by writing the plan
}

// newPlan plans the files for a desired state beside the spec files that there are.
func (r *Reconciler) newPlan(want *desired, dirs *cdi.SpecDirs) *plan {
	p := &plan{desired: want, descriptors: describe(want.resources)}
	for _, f := range r.files {
		p.files = append(p.files, f.plan(want.specs[f.kind], dirs))
	}
	return p
}

// plan plans the file for a spec. A name that another file of the same priority defines is left out: with it in both,
// engines would offer neither, and the users of the other file would lose their device too.
func (f *specFile) plan(spec *specs.Spec, dirs *cdi.SpecDirs) plannedFile {
	p := plannedFile{specFile: f, spec: spec, offered: qualifiedNames(spec)}
	if f.path == "" {
		return p
	}
	p.conflicts = dirs.Conflicts(f.path, spec)
	p.content = cdi.Without(spec, p.conflicts, cdi.Conflict.LeftToOther)
	p.offered = qualifiedNames(cdi.Without(spec, p.conflicts, cdi.Conflict.Unavailable))
	if file := dirs.FileAt(f.path); file != nil {
		p.old = file.Spec
	}
	p.unchanged = unchangedNames(p.old, spec, dirs.OfferedFrom(f.path))
	if p.old != nil && p.old.Kind != f.kind {
		p.fail(&KindError{f.path, p.old.Kind, f.kind})
	} else if err := dirs.Unread(f.path); err != nil {
		p.fail(err)
	}
	return p
}

// fail notes why the file stays as it is.
func (f *plannedFile) fail(err error) { f.err, f.offered = err, f.unchanged }

// unchangedNames are the qualified names of the devices that a file has with the desired edits and that engines take
// from it.
func unchangedNames(old, want *specs.Spec, taken map[string]bool) map[string]bool {
	names := map[string]bool{}
	if old == nil || want == nil || old.Kind != want.Kind ||
		!reflect.DeepEqual(want.ContainerEdits, old.ContainerEdits) {
		return names
	}
	for _, d := range old.Devices {
		names[old.Kind+"="+d.Name] = taken[d.Name] && slices.ContainsFunc(want.Devices, func(w specs.Device) bool {
			return w.Name == d.Name && reflect.DeepEqual(w.ContainerEdits, d.ContainerEdits)
		})
	}
	return names
}

func qualifiedNames(s *specs.Spec) map[string]bool {
	names := map[string]bool{}
	if s != nil {
		for i := range s.Devices {
			names[s.Kind+"="+s.Devices[i].Name] = true
		}
	}
	return names
}

// offered are the qualified names that engines take from our specs with the desired edits.
func (p *plan) offered() map[string]bool {
	all := map[string]bool{}
	for i := range p.files {
		maps.Copy(all, p.files[i].offered)
	}
	return all
}

// conflicts are the desired names that other spec files define too.
func (p *plan) conflicts() []cdi.Conflict {
	var list []cdi.Conflict
	for i := range p.files {
		list = append(list, p.files[i].conflicts...)
	}
	return list
}

// requiredErr is why containers do not get a required extra, or nil.
func (p *plan) requiredErr() error {
	for i := range p.files {
		f := &p.files[i]
		if f.extra == nil || !f.extra.Required {
			continue
		}
		if f.err != nil {
			return f.err
		}
		if at := slices.IndexFunc(f.conflicts, cdi.Conflict.Unavailable); at >= 0 {
			return &RequiredError{Extra: f.extra.Extra, Conflict: f.conflicts[at]}
		}
	}
	return nil
}

// specErr is why a spec is not as desired, or nil.
func (p *plan) specErr() error {
	for i := range p.files {
		if err := p.files[i].err; err != nil {
			return err
		}
	}
	return p.requiredErr()
}

// err joins the errors of the specs and of the descriptors.
func (p *plan) err() error { return errors.Join(p.specErr(), p.descriptorErr) }

// checkTaken returns a TakenError if there would be nothing to offer: an administrator has to decide which file to
// remove.
func (r *Reconciler) checkTaken(p *plan) error {
	conflicts := r.ofDevices(p.conflicts(), p.resources)
	devices := countHealthy(p.resources)
	if devices == 0 || countHealthy(resource.MarkUnhealthy(p.resources, r.takenBy(conflicts))) > 0 {
		return nil
	}
	err := &TakenError{Devices: devices, Conflicts: conflicts}
	if p.files[0].old != nil {
		err.Path = r.opts.Path
	}
	return err
}

// judge returns the resources of a plan with the reasons for which containers cannot be given devices. A device is
// healthy if it is in the snapshot, engines take it from our spec, and it has its descriptor.
func (r *Reconciler) judge(p *plan) []resource.Resource {
	taken, offered, requiredErr, specErr := r.takenBy(p.conflicts()), p.offered(), p.requiredErr(), p.specErr()
	return resource.MarkUnhealthy(p.resources, func(d *resource.Device) string {
		switch descriptorErr := p.descriptorErrs[d.UUID]; {
		case requiredErr != nil:
			return requiredErr.Error()
		case offered[r.qualified(d)] && descriptorErr != nil:
			return descriptorErr.Error()
		case offered[r.qualified(d)]:
			return ""
		case specErr != nil:
			return cmp.Or(p.leftOut[d.UUID], taken(d), specErr.Error())
		default:
			return cmp.Or(p.leftOut[d.UUID], taken(d), "not in the CDI spec")
		}
	})
}

// stateOf is the state in which a plan was written as far as possible.
func (r *Reconciler) stateOf(p *plan) State {
	s := State{Snapshot: p.snapshot, Spec: p.specs[r.opts.Spec.Kind], Err: p.err(), offered: p.offered()}
	s.Resources = r.withGrants(r.judge(p), p.desired, s.offered)
	s.remarks = slices.Concat(p.remarks, r.conflictRemarks(p))
	if s.Err != nil {
		s.remarks = append(s.remarks, newRemark("specs", "a CDI spec or descriptor is not up to date, and its devices are unhealthy", s.Err))
	}
	return s
}

// stateBetween is the state while a plan is written: it has what both the state before and the plan have, and no device
// is healthier than before.
func (r *Reconciler) stateBetween(before State, p *plan) State {
	s := before
	s.Snapshot, s.offered = p.snapshot, p.offered()
	maps.DeleteFunc(s.offered, func(name string, _ bool) bool { return !before.offered[name] })
	s.Resources = r.withGrants(onlyPublished(r.judge(p), before.Resources), p.desired, s.offered)
	return s
}
