package cdi

import (
	"fmt"
	"path/filepath"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/exit"
)

// ConflictsWith says whether writing spec to path would clash: another file defines one of its names. The error names
// the file and has both ways out as its hint. That holds for a file of a lower priority too, which the new one would
// hide: somebody put it there. A path that the catalogue's directories do not hold clashes with nothing.
func (c *Catalogue) ConflictsWith(path string, spec *specs.Spec) error {
	priority := c.dirIndex(filepath.Dir(path))
	if priority < 0 {
		return nil
	}
	path = filepath.Join(c.Dirs[priority], filepath.Base(path))
	for _, f := range c.Files {
		if f.Spec == nil || f.Path == path || f.Spec.Kind != spec.Kind {
			continue
		}
		if name, ok := commonName(spec, f.Spec); ok {
			return clash(f, qualifiedName(spec.Kind, name), priority)
		}
	}
	return nil
}

func clash(f SpecFile, name string, priority int) error {
	what := "engines would have neither"
	switch {
	case f.Priority > priority:
		what = "engines would take that one"
	case f.Priority < priority:
		what = "engines would no longer see that one"
	}
	hint := fmt.Sprintf("remove %s, or choose another kind with --cdi-kind VENDOR/CLASS", f.Path)
	return exit.With(exit.Failure, hint, fmt.Errorf("%s defines %s too: %s", f.Path, name, what))
}

// commonName is the first name of a that b has too.
func commonName(a, b *specs.Spec) (string, bool) {
	names := map[string]bool{}
	for i := range b.Devices {
		names[b.Devices[i].Name] = true
	}
	for i := range a.Devices {
		if names[a.Devices[i].Name] {
			return a.Devices[i].Name, true
		}
	}
	return "", false
}
