package node

import (
	"cmp"
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// desired has the node's GPUs and the spec files that should be on disk. It is the result of a scan.
type desired struct {
	snapshot  *gpu.Snapshot
	specs     map[string]*specs.Spec // by kind, without those that would have no devices
	hookless  *specs.Spec            // the GPUs' spec without hooks; nil unless Options.WithoutCDI
	resources []resource.Resource
	leftOut   map[string]string // why devices are not in the spec, by UUID
	remarks   []Remark
	// driverDirs are the directories of the driver's files that containers can get, without those of sockets, which
	// programs change at any time.
	driverDirs []string
}

// plan says which spec files to write for a desired state, beside those of other programs, and which names engines
// then take from our files. When the plan is written, errors are added to it.
type plan struct {
	*desired
	files       []plannedFile          // in the order of the Reconciler's files
	conflicts   []cdi.Conflict         // desired names that other spec files also define
	descriptors map[string]*Descriptor // by UUID
	// names are the qualified names in the desired specs. The value is empty if engines take the name from our file
	// with the desired edits, and otherwise why they do not.
	names map[string]string

	written        bool             // whether a spec was written or removed
	descriptorErrs map[string]error // why devices have no descriptor, by UUID
	descriptorErr  error            // all of descriptorErrs as one error
}

// plannedFile is a spec file with its desired content.
type plannedFile struct {
	*specFile
	content   *specs.Spec     // the desired spec without the names that other files define; nil removes the file
	old       *specs.Spec     // the content of the file, or nil if it is not a spec
	unchanged map[string]bool // qualified names that engines take from the file as it is, with the desired edits
	err       error           // why the file is not as desired
	created   bool            // whether writing the plan created the file
}

// newPlan plans the files for a desired state, beside the existing spec files.
func (r *Reconciler) newPlan(want *desired, dirs *cdi.SpecDirs) *plan {
	p := &plan{desired: want, descriptors: describe(want.resources), names: map[string]string{}}
	for _, f := range r.files {
		p.add(f, want.specs[f.kind], dirs)
	}
	return p
}

// add adds a spec file to the plan. If the spec is nil, the file is to be removed.
func (p *plan) add(file *specFile, spec *specs.Spec, dirs *cdi.SpecDirs) {
	if spec != nil {
		for _, d := range spec.Devices {
			p.names[spec.Kind+"="+d.Name] = ""
		}
	}
	p.files = append(p.files, plannedFile{specFile: file})
	if file.path == "" {
		return
	}
	conflicts := dirs.Conflicts(file.path, spec)
	p.conflicts = append(p.conflicts, conflicts...)
	for _, c := range conflicts {
		if c.Unavailable() {
			p.names[c.Name] = c.String()
		}
	}
	f := &p.files[len(p.files)-1]
	f.content = cdi.Without(spec, conflicts)
	if there := dirs.FileAt(file.path); there != nil {
		f.old = there.Spec
	}
	f.unchanged = unchangedNames(f.old, spec, dirs.OfferedFrom(file.path))
	if f.old != nil && f.old.Kind != file.kind {
		p.fail(f, &KindError{file.path, f.old.Kind, file.kind})
	} else if err := dirs.Unread(file.path); err != nil {
		p.fail(f, err)
	}
}

// fail records why a file cannot be written.
func (p *plan) fail(f *plannedFile, err error) {
	f.err = err
	for name, reason := range p.names {
		if strings.HasPrefix(name, f.kind+"=") && !f.unchanged[name] {
			p.names[name] = cmp.Or(reason, err.Error())
		}
	}
}

// unchangedNames returns the qualified names of the devices that a file has with the desired edits, and that engines
// take from this file.
func unchangedNames(old, want *specs.Spec, offered map[string]bool) map[string]bool {
	names := map[string]bool{}
	if old == nil || want == nil || old.Kind != want.Kind ||
		!reflect.DeepEqual(want.ContainerEdits, old.ContainerEdits) {
		return names
	}
	for _, d := range old.Devices {
		name := old.Kind + "=" + d.Name
		names[name] = offered[name] && slices.ContainsFunc(want.Devices, func(w specs.Device) bool {
			return w.Name == d.Name && reflect.DeepEqual(w.ContainerEdits, d.ContainerEdits)
		})
	}
	return names
}

// requiredErr returns why containers cannot get a required extra, or nil.
func (p *plan) requiredErr() error {
	for i := range p.files {
		f := &p.files[i]
		if f.extra == nil || !f.extra.Required {
			continue
		}
		if f.err != nil {
			return f.err
		}
		at := slices.IndexFunc(p.conflicts, func(c cdi.Conflict) bool {
			return c.Unavailable() && strings.HasPrefix(c.Name, f.kind+"=")
		})
		if at >= 0 {
			return &RequiredError{Extra: f.extra.Extra, Conflict: p.conflicts[at]}
		}
	}
	return nil
}

// specErr returns why a spec on disk is not the desired one, or nil.
func (p *plan) specErr() error {
	for i := range p.files {
		if err := p.files[i].err; err != nil {
			return err
		}
	}
	return p.requiredErr()
}

// err returns the errors of the specs and of the descriptors.
func (p *plan) err() error { return errors.Join(p.specErr(), p.descriptorErr) }

// checkTaken returns a TakenError if no device could be offered, since an administrator must then decide which file to
// remove.
func (r *Reconciler) checkTaken(p *plan) error {
	conflicts, devices := r.deviceConflicts(p), countHealthy(p.resources)
	if devices == 0 || len(conflicts) < devices {
		return nil
	}
	err := &TakenError{Devices: devices, Conflicts: conflicts}
	if p.files[0].old != nil {
		err.Path = r.opts.Path
	}
	return err
}

// markUnhealthy returns the resources of a plan. A device that containers cannot get is marked unhealthy in them:
// engines do not take it from our spec, or it has no descriptor.
func (r *Reconciler) markUnhealthy(p *plan) []resource.Resource {
	requiredErr := p.requiredErr()
	return resource.MarkUnhealthy(p.resources, func(d *resource.Device) string {
		reason, inSpec := p.names[r.cdiName(d)]
		switch {
		case requiredErr != nil:
			return requiredErr.Error()
		case !inSpec:
			return cmp.Or(p.leftOut[d.UUID], "not in the CDI spec")
		case reason == "" && p.descriptorErrs[d.UUID] != nil:
			return p.descriptorErrs[d.UUID].Error()
		}
		return reason
	})
}

// stateOf returns the state after a plan was written. What could not be written is not in it.
func (r *Reconciler) stateOf(p *plan) State {
	s := State{Snapshot: p.snapshot, Spec: p.specs[r.opts.Spec.Kind], Err: p.err(), names: p.names}
	s.Resources = r.withGrants(r.markUnhealthy(p), p.desired, s.offers)
	s.remarks = slices.Concat(p.remarks, r.conflictRemarks(p))
	if s.Err != nil {
		s.remarks = append(s.remarks, newRemark("specs", "a CDI spec or descriptor is not up to date", s.Err))
	}
	return s
}

// stateBetween returns the state while a plan is being written. It has only devices that are in both the previous
// state and the plan, and no device is healthier than before.
func (r *Reconciler) stateBetween(before State, p *plan) State {
	s := before.withoutHealth()
	s.Snapshot, s.names = p.snapshot, maps.Clone(p.names)
	maps.DeleteFunc(s.names, func(name, _ string) bool { return !before.offers(name) })
	s.Resources = r.withGrants(onlyPublished(r.markUnhealthy(p), s.Resources), p.desired, s.offers)
	return s
}
