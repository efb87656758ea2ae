package driver

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// addModules adds the modules of the X server. Each module comes from the first directory that has it: below the
// directories with libraries of the driver, and then below the usual ones.
func (s *libraryScan) addModules(d *Driver) {
	var dirs []string
	add := func(dir string) {
		for _, sub := range xorgDirs {
			dirs = append(dirs, under(dir, sub))
		}
	}
	for _, dir := range s.dirs {
		if dir.libraries > 0 {
			add(dir.path)
		}
	}
	add("/usr/lib")
	add("/usr/lib64")
	for _, m := range xorgModules {
		name := strings.ReplaceAll(m.file, "{version}", s.version)
		finding := Finding{Name: name, Kind: KindLibrary, Capabilities: Display, Note: notFound}
		for _, dir := range dirs {
			at := under(dir, name)
			if _, _, err := s.root.stat(at); errors.Is(err, fs.ErrNotExist) {
				continue
			}
			f := s.inspect(at, nil)
			f.SONAME, f.Links, f.Capabilities = "", nil, Display
			finding = f.finding()
			if f.err == nil {
				if m.link != "" {
					f.Links = []Link{{path.Join(path.Dir(f.Path), m.link), path.Base(f.Path)}}
				}
				d.Libraries = append(d.Libraries, f.Library)
				break
			}
		}
		d.Findings = append(d.Findings, finding)
	}
}

func isXorgModule(library string) bool {
	return slices.ContainsFunc(xorgModules, func(m xorgModule) bool { return strings.HasPrefix(m.file, library+".so") })
}
