package driver

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// xorg finds the modules of the X server, each in the first directory that has it: below those with libraries of the
// driver, then in the usual ones.
func (s *libraryScan) xorg() ([]Library, []Finding) {
	var dirs []string
	for _, d := range s.dirs {
		if d.libraries == 0 {
			continue
		}
		for _, sub := range xorgSubdirs {
			dirs = append(dirs, under(d.path, sub))
		}
	}
	dirs = append(dirs, xorgDirs...)
	var libraries []Library
	var findings []Finding
	for _, m := range xorgModules {
		name := fill(m.file, "{version}", s.version)
		row := Finding{Name: name, Kind: KindLibrary, Capabilities: Display, Note: notFound}
		for _, dir := range dirs {
			f, err := s.xorgModule(dir, name, m.link)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			row.Path, row.Note, row.Used, row.Broken = f.HostPath, "", err == nil, f.broken()
			if err != nil {
				row.Note = err.Error()
				continue
			}
			libraries = append(libraries, f.Library)
			break
		}
		findings = append(findings, row)
	}
	return libraries, findings
}

func (s *libraryScan) xorgModule(dir, name, link string) (*foundLibrary, error) {
	if _, _, err := s.root.stat(under(dir, name)); err != nil {
		return &foundLibrary{}, err
	}
	f := s.inspect(under(dir, name), nil)
	f.SONAME, f.Links, f.Capabilities = "", nil, Display
	if link != "" {
		f.Links = []Link{{path.Join(path.Dir(f.Path), link), path.Base(f.Path)}}
	}
	return f, f.err
}

func isXorgModule(library string) bool {
	return slices.ContainsFunc(xorgModules, func(m xorgModule) bool { return strings.HasPrefix(m.file, library+".so") })
}
