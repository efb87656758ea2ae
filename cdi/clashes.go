package cdi

import (
	"cmp"
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Clash is a name of a spec that another file defines too.
type Clash struct {
	// Name is the qualified name.
	Name string
	// File is the other file.
	File string
	// State is that of the spec's device of that name: Available if engines take it and hide the other file's, Shadowed
	// if they take the other file's, and Conflict if they take neither.
	State State

	yields bool
}

// Lost reports whether engines do not take the spec's device.
func (c Clash) Lost() bool { return c.State != Available }

// Yields reports whether the other file is of the spec's priority, so that engines take its device once the spec leaves
// the name out.
func (c Clash) Yields() bool { return c.yields }

// String names the other file and the device.
func (c Clash) String() string { return c.File + " defines " + c.Name + " too" }

// ClashError is that a spec cannot be written beside another file without a clash.
type ClashError struct{ Clash Clash }

// Error names the other file and the device, and what engines would do with both files.
func (e *ClashError) Error() string {
	effect := map[State]string{
		Conflict:  "engines would have neither",
		Shadowed:  "engines would take that one",
		Available: "engines would no longer see that one",
	}[e.Clash.State]
	return e.Clash.String() + ": " + effect
}

// ConflictsWith returns a *ClashError if another file defines one of the names of a spec that is to be written to path.
// This includes a file of a lower priority, which the new one would hide: an administrator put it there. A path outside
// the directories clashes with nothing.
func (c *SpecDirs) ConflictsWith(path string, spec *specs.Spec) error {
	if list := c.Clashes(path, spec); len(list) > 0 {
		return &ClashError{list[0]}
	}
	return nil
}

// Clashes are the names of spec that other files define too, in the order of its devices, as if spec were in the file
// at path. A path outside the directories clashes with nothing, and so does an empty path or a nil spec.
func (c *SpecDirs) Clashes(path string, spec *specs.Spec) []Clash {
	path, priority := c.locate(path)
	if priority < 0 || spec == nil {
		return nil
	}
	others := map[string][]Offer{}
	for _, o := range c.Devices {
		if o.File != path {
			others[o.Name] = append(others[o.Name], o)
		}
	}
	var list []Clash
	for i := range spec.Devices {
		ours := Offer{Name: qualifiedName(spec.Kind, spec.Devices[i].Name), File: path, priority: priority}
		if o := others[ours.Name]; len(o) > 0 {
			list = append(list, clashOf(ours, o))
		}
	}
	return list
}

// clashOf is the clash of an offer with others of its name.
func clashOf(ours Offer, others []Offer) Clash {
	all := append(slices.Clone(others), ours)
	slices.SortStableFunc(all, func(a, b Offer) int { return b.priority - a.priority })
	for i := range all {
		all[i].State, all[i].Other = Available, ""
	}
	resolveName(all)
	resolved := all[slices.IndexFunc(all, func(o Offer) bool { return o.File == ours.File })]
	yields := func(o Offer) bool { return o.priority == ours.priority && !leadsTo(o.File, ours.File) }
	return Clash{
		Name: ours.Name, File: cmp.Or(resolved.Other, others[0].File), State: resolved.State,
		yields: slices.ContainsFunc(others, yields),
	}
}

// leadsTo reports whether a file is a link to another. It defines what the other file defines, so leaving a name out of
// the other file does not help.
func leadsTo(link, path string) bool {
	target, err := filepath.EvalSymlinks(link)
	if err != nil {
		return false
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	return err == nil && target == filepath.Join(dir, filepath.Base(path))
}

// Without is a spec without the devices whose clashes drop selects, or nil if no device is left.
func Without(spec *specs.Spec, clashes []Clash, drop func(Clash) bool) *specs.Spec {
	dropped := map[string]bool{}
	for _, c := range clashes {
		dropped[c.Name] = drop(c)
	}
	if spec == nil || len(dropped) == 0 {
		return spec
	}
	less := *spec
	less.Devices = slices.DeleteFunc(slices.Clone(spec.Devices), func(d specs.Device) bool {
		return dropped[qualifiedName(spec.Kind, d.Name)]
	})
	if len(less.Devices) == 0 {
		return nil
	}
	return &less
}
