package cdi

import (
	"cmp"
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Conflict is a device name that a spec and another file define.
type Conflict struct {
	// Name is the qualified name.
	Name string
	// File is the other file.
	File string
	// State says what engines do with the spec's device: Available if they take it and ignore the other file's device,
	// Shadowed if they take the other file's device, and Conflicting if they take neither.
	State State

	leftToOther bool // whether Without removes the name from the spec
}

// Unavailable reports whether engines do not take the spec's device.
func (c Conflict) Unavailable() bool { return c.State != Available }

// String names the other file and the device.
func (c Conflict) String() string { return c.File + " also defines " + c.Name }

// ConflictError means that a spec is not written because another file defines one of its names.
type ConflictError struct{ Conflict Conflict }

// Error names the other file and the device, and what engines would do with both files.
func (e *ConflictError) Error() string {
	effect := map[State]string{
		Conflicting: "engines would offer neither",
		Shadowed:    "engines would use the device of that file",
		Available:   "engines would ignore the device of that file",
	}[e.Conflict.State]
	return e.Conflict.String() + ": " + effect
}

// CheckConflicts returns a *ConflictError if another file defines a device name of a spec that is about to be written
// to path. That is an error even if the other file has a lower priority, so that the new file would hide its device:
// an administrator put it there. A path outside the directories has no conflicts.
func (d *SpecDirs) CheckConflicts(path string, spec *specs.Spec) error {
	if list := d.Conflicts(path, spec); len(list) > 0 {
		return &ConflictError{list[0]}
	}
	return nil
}

// Conflicts returns the device names of spec that other files also define, in the order of its devices, as if spec
// were in the file at path. There are no conflicts if path is empty or outside the directories, or if spec is nil.
func (d *SpecDirs) Conflicts(path string, spec *specs.Spec) []Conflict {
	path, priority := d.locate(path)
	if priority < 0 || spec == nil {
		return nil
	}
	others := map[string][]Definition{}
	for _, o := range d.Devices {
		if o.File != path {
			others[o.Name] = append(others[o.Name], o)
		}
	}
	var list []Conflict
	for i := range spec.Devices {
		ours := Definition{Name: qualifiedName(spec.Kind, spec.Devices[i].Name), File: path, priority: priority}
		if o := others[ours.Name]; len(o) > 0 {
			list = append(list, conflictOf(ours, o))
		}
	}
	return list
}

// conflictOf returns the conflict between our definition of a device and the other definitions of it.
func conflictOf(ours Definition, others []Definition) Conflict {
	all := append(slices.Clone(others), ours)
	slices.SortStableFunc(all, func(a, b Definition) int { return b.priority - a.priority })
	for i := range all {
		all[i].State, all[i].Other = Available, ""
	}
	resolveName(all)
	resolved := all[slices.IndexFunc(all, func(o Definition) bool { return o.File == ours.File })]
	leftTo := func(o Definition) bool { return o.priority == ours.priority && !leadsTo(o.File, ours.File) }
	return Conflict{
		Name: ours.Name, File: cmp.Or(resolved.Other, others[0].File), State: resolved.State,
		leftToOther: slices.ContainsFunc(others, leftTo),
	}
}

// leadsTo reports whether a file is a link to another file. Both then define the same devices, so removing a name from
// the other file resolves no conflict.
func leadsTo(link, path string) bool {
	target, err := filepath.EvalSymlinks(link)
	if err != nil {
		return false
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	return err == nil && target == filepath.Join(dir, filepath.Base(path))
}

// Without returns a spec without the device names that it must leave to another file of the same priority: if both
// files defined such a name, engines would offer it from neither. If no device remains, the result is nil.
func Without(spec *specs.Spec, conflicts []Conflict) *specs.Spec {
	left := map[string]bool{}
	for _, c := range conflicts {
		left[c.Name] = c.leftToOther
	}
	if spec == nil || len(left) == 0 {
		return spec
	}
	less := *spec
	less.Devices = slices.DeleteFunc(slices.Clone(spec.Devices), func(d specs.Device) bool {
		return left[qualifiedName(spec.Kind, d.Name)]
	})
	if len(less.Devices) == 0 {
		return nil
	}
	return &less
}
