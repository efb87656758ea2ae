package cdi

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// inspect follows a path to a library and reads what a container needs to know of it.
func (s *libraryScan) inspect(p string, row *libraryRow) *foundLibrary {
	f := &foundLibrary{Library: Library{Path: p, Capabilities: unlisted}, file: path.Base(p), row: row}
	if row != nil {
		f.Capabilities = row.capabilities
	}
	real, err := s.root.resolve(p)
	if err != nil {
		f.err = err
		return f
	}
	f.Path, f.HostPath = s.root.inside(real), real
	f.SONAME, f.err = readSONAME(real, s.machine)
	if f.err == nil && !isPlain(f.Path) {
		f.err = fmt.Errorf("its path has a character that cannot be passed on: %q", f.Path)
	}
	if f.err == nil {
		f.Links = s.links(f.Library, row)
	}
	return f
}

// links are the symlinks that a container needs beside a library: its SONAME, the name that a linker looks for if the
// host has that too, and those of the table.
func (s *libraryScan) links(lib Library, row *libraryRow) []Link {
	dir, file := path.Split(lib.Path)
	links := map[string]string{}
	if lib.SONAME != file {
		links[dir+lib.SONAME] = file
	}
	if base, _, ok := splitLibrary(lib.SONAME); ok {
		dev := base + ".so"
		if _, err := os.Lstat(filepath.Join(filepath.Dir(lib.HostPath), dev)); err == nil {
			links[dir+dev] = lib.SONAME
		}
	}
	if row != nil {
		for _, l := range row.links {
			links[dir+l.Path] = fill(l.Target, "{file}", file, "{soname}", lib.SONAME)
		}
	}
	return sortedLinks(links)
}

func sortedLinks(links map[string]string) []Link {
	var list []Link
	for p, target := range links {
		list = append(list, Link{p, target})
	}
	slices.SortStableFunc(list, func(a, b Link) int { return strings.Compare(a.Path, b.Path) })
	return list
}
