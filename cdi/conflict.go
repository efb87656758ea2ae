package cdi

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/exit"
)

// Clash is a name of a spec that another file defines too.
type Clash struct {
	// Name is the qualified name.
	Name string
	// File is the other file.
	File string
	// State says what engines do with the spec's device of that name: Available if they take it and hide the other
	// file's, Shadowed if they take the other file's, and Conflict if they take neither.
	State State

	yields bool
}

// Lost reports whether engines do not take the spec's device.
func (c Clash) Lost() bool { return c.State != Available }

// Yields reports whether the other file is of the spec's priority, so that engines take its device as soon as the spec
// leaves the name out.
func (c Clash) Yields() bool { return c.yields }

// String says it in words.
func (c Clash) String() string { return c.File + " defines " + c.Name + " too" }

// Hint says what to do about it.
func (c Clash) Hint() string {
	return fmt.Sprintf("remove %s, or choose another kind with --cdi-kind VENDOR/CLASS", c.File)
}

// Clashes are the names of spec that other files define too, in the order of its devices, as if spec were written to
// path. No path, one that the catalogue's directories do not hold, and no spec clash with nothing.
func (c *Catalogue) Clashes(path string, spec *specs.Spec) []Clash {
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

// Without is a spec without the devices of those clashes that drop chooses, or nil if no device is left.
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

// clashOf says what becomes of an offer beside others of its name.
func clashOf(ours Offer, others []Offer) Clash {
	all := append(slices.Clone(others), ours)
	slices.SortStableFunc(all, func(a, b Offer) int { return b.priority - a.priority })
	for i := range all {
		all[i].State, all[i].Other = Available, ""
	}
	resolveName(all)
	resolved := all[slices.IndexFunc(all, func(o Offer) bool { return o.File == ours.File })]
	return Clash{
		Name: ours.Name, File: cmp.Or(resolved.Other, others[0].File), State: resolved.State,
		yields: slices.ContainsFunc(others, func(o Offer) bool { return o.priority == ours.priority && !leadsTo(o.File, ours.File) }),
	}
}

// leadsTo reports whether a file is a link to another. What it defines follows the other file, so nothing is won by
// leaving a name out of that one.
func leadsTo(link, path string) bool {
	target, err := filepath.EvalSymlinks(link)
	if err != nil {
		return false
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	return err == nil && target == filepath.Join(dir, filepath.Base(path))
}

// ConflictsWith says whether writing spec to path would clash: another file defines one of its names. The error names
// the file and has both ways out as its hint. That holds for a file of a lower priority too, which the new one would
// hide: somebody put it there. A path that the catalogue's directories do not hold clashes with nothing.
func (c *Catalogue) ConflictsWith(path string, spec *specs.Spec) error {
	list := c.Clashes(path, spec)
	if len(list) == 0 {
		return nil
	}
	what := map[State]string{
		Conflict:  "engines would have neither",
		Shadowed:  "engines would take that one",
		Available: "engines would no longer see that one",
	}[list[0].State]
	return exit.With(exit.Failure, list[0].Hint(), fmt.Errorf("%s: %s", list[0], what))
}

// locate is a path as the catalogue writes it, and its directory's index in Dirs, or -1.
func (c *Catalogue) locate(path string) (string, int) {
	priority := -1
	if path != "" {
		priority = c.dirIndex(filepath.Dir(path))
	}
	if priority < 0 {
		return path, priority
	}
	return filepath.Join(c.Dirs[priority], filepath.Base(path)), priority
}

// Taken are the names of the devices, without their kind, that engines take from the file at path.
func (c *Catalogue) Taken(path string) map[string]bool {
	path, _ = c.locate(path)
	names := map[string]bool{}
	for _, f := range c.Files {
		if f.Path != path || f.Spec == nil {
			continue
		}
		for i := range f.Spec.Devices {
			name := f.Spec.Devices[i].Name
			names[name] = slices.ContainsFunc(c.Devices, func(o Offer) bool {
				return o.File == path && o.State == Available && o.Name == qualifiedName(f.Kind, name)
			})
		}
	}
	return names
}

// Unread is nil, or says why engines do not read the file at path whatever is in it: a directory of a lower priority
// cannot be read, and they stop there.
func (c *Catalogue) Unread(path string) error {
	if _, priority := c.locate(path); c.unread == nil || priority < c.unreadDir {
		return nil
	}
	return exit.With(exit.Failure, "make "+c.Dirs[c.unreadDir]+" a directory, or remove it",
		fmt.Errorf("engines do not read %s, since they stop at a CDI directory that cannot be read: %w", path, c.unread))
}
