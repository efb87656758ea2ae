package driver

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// addModules adds the modules of the X server. Each module comes from the first directory that has it: below the
// directories with libraries of the driver, then below the usual ones, and then Debian's.
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
	dirs = append(dirs, privateModules)
	for _, m := range xorgModules {
		m.file = strings.ReplaceAll(m.file, "{version}", s.version)
		finding := Finding{Name: m.file, Kind: KindLibrary, Capabilities: Display, Note: notFound}
		for _, dir := range dirs {
			f := s.inspectModule(dir, m)
			if f == nil {
				continue
			}
			finding = f.finding()
			if f.err == nil {
				d.Libraries = append(d.Libraries, f.Library)
				break
			}
		}
		d.Findings = append(d.Findings, finding)
	}
}

// inspectModule inspects a module in a directory, or returns nil if the directory does not have it. The container gets
// it in the same directory, even if the host has a link there: the X server searches its own directories only.
func (s *libraryScan) inspectModule(dir string, m xorgModule) *foundLibrary {
	at := under(dir, m.file)
	if m.link != "" && !s.exists(at) {
		at = under(dir, m.link)
	}
	if !s.exists(at) {
		return nil
	}
	f := s.inspect(at, nil)
	if path.Base(at) == m.link && path.Base(f.HostPath) != m.file {
		return nil // of another version
	}
	f.file, f.SONAME, f.Links, f.Capabilities = m.file, "", nil, Display
	if dir == privateModules {
		dir = m.dir
	} else if real, err := s.root.resolveDir(dir); err == nil { // /lib can be a link to /usr/lib
		dir = s.root.inside(real)
	}
	f.Path = under(dir, m.file)
	if m.link != "" {
		f.Links = []Link{{under(dir, m.link), m.file}}
	}
	return f
}

func (s *libraryScan) exists(path string) bool {
	_, _, err := s.root.stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

func isXorgModule(library string) bool {
	return slices.ContainsFunc(xorgModules, func(m xorgModule) bool { return strings.HasPrefix(m.file, library+".so") })
}
