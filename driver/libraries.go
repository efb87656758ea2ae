package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/internal/regular"
)

// libraryScan looks for libraries, directory by directory.
type libraryScan struct {
	root    root
	machine machine
	version string // the driver's; found by the scan if it was empty
	rows    map[string]*libraryRow

	dirs []*libraryDir
	seen map[string]bool // real paths of dirs
	// found is by file name, for libraries with a version of their own by library.
	found map[string]*foundLibrary
	// others are driver versions of libraries that were passed over, by library.
	others map[string][]string
	cache  Finding
}

// libraryDir is a directory that exists: its path as it was asked for, its real path, and what is in it.
type libraryDir struct {
	path, real string
	names      []string
	libraries  int
}

// foundLibrary is a file that belongs to the driver by its name; err says why it cannot be used.
type foundLibrary struct {
	Library
	file string      // the name that it was found by
	row  *libraryRow // nil for one that the table does not have
	err  error
	// passedOver are other copies or versions, on the host.
	passedOver []string
}

func newLibraryScan(r root, m machine, version string) *libraryScan {
	s := &libraryScan{
		root: r, machine: m, version: version,
		rows: map[string]*libraryRow{}, seen: map[string]bool{},
		found: map[string]*foundLibrary{}, others: map[string][]string{},
	}
	for i := range libraryTable {
		s.rows[libraryTable[i].name] = &libraryTable[i]
	}
	return s
}

// run searches first, the directory on the host of a library that was named, if it is not empty; then the directories
// that the loader's cache names and the usual ones, and behind each those that links in it lead to.
func (s *libraryScan) run(first string) {
	if first != "" && (s.root.dir == "/" || strings.HasPrefix(first, s.root.dir+"/")) {
		s.addDir(s.root.inside(first))
	}
	for _, dir := range s.cacheDirs() {
		s.addDir(dir)
	}
	for _, dir := range host.LibraryDirs(s.machine.multiarch) {
		s.addDir("/" + dir)
	}
	if s.version == "" {
		s.version = s.guessVersion()
	}
	for _, d := range s.dirs {
		s.searchDir(d)
	}
}

// maxLoaderCache is more than any distribution's cache has.
const maxLoaderCache = ldcache.MaxSize

// cacheDirs are the directories of the driver's libraries that the loader's cache of the root names.
func (s *libraryScan) cacheDirs() []string {
	const file = "/etc/ld.so.cache"
	s.cache = Finding{Name: file, Kind: KindConfig}
	dirs, err := s.readCache(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		s.cache.Note = "not there; the usual directories are searched all the same"
	case err != nil:
		s.cache.Note = err.Error() + "; the usual directories are searched all the same"
	case len(dirs) == 0:
		s.cache.Note = "names no library of the driver"
	default:
		s.cache.Note = "names " + strings.Join(dirs, ", ")
	}
	return dirs
}

func (s *libraryScan) readCache(file string) ([]string, error) {
	real, err := s.root.resolve(file)
	if err != nil {
		return nil, err
	}
	data, err := regular.ReadFile(real, maxLoaderCache)
	if err != nil {
		return nil, err
	}
	s.cache.Path = real
	cache, err := ldcache.Parse(data)
	if err != nil {
		return nil, err
	}
	flags, _ := ldcache.FlagsFor(s.machine.goarch)
	var dirs []string
	for _, e := range cache.Entries {
		name, _, ok := splitLibrary(e.Name)
		if !ok || s.rows[name] == nil || e.Flags != flags || !path.IsAbs(e.Path) {
			continue
		}
		if dir := path.Dir(path.Clean(e.Path)); !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	return dirs, nil
}

// addDir notes a directory for the search, once, and those that it leads to.
func (s *libraryScan) addDir(dir string) {
	real, names, err := s.root.names(dir)
	if err != nil || s.seen[real] {
		return
	}
	s.seen[real] = true
	d := &libraryDir{path: dir, real: real, names: names}
	s.dirs = append(s.dirs, d)
	s.followLinks(d)
}

// followLinks adds the directories that links of core libraries lead to, such as those of Debian's alternatives, and
// the known subdirectories.
func (s *libraryScan) followLinks(d *libraryDir) {
	for _, name := range d.names {
		base, _, ok := splitLibrary(name)
		if !ok || !slices.Contains(coreLibraries, base) {
			continue
		}
		link, err := os.Readlink(filepath.Join(d.real, name))
		if err != nil || !strings.Contains(link, "/") {
			continue
		}
		if real, err := s.root.resolve(under(s.root.inside(d.real), name)); err == nil {
			s.addDir(s.root.inside(filepath.Dir(real)))
		}
	}
	for _, sub := range librarySubdirs {
		if slices.Contains(d.names, sub) {
			s.addDir(under(d.path, sub))
		}
	}
}

// guessVersion is the version of the library that a core library's SONAME leads to, or else the newest of any.
func (s *libraryScan) guessVersion() string {
	var newest string
	for _, d := range s.dirs {
		for _, name := range d.names {
			base, suffix, ok := splitLibrary(name)
			if !ok || !slices.Contains(coreLibraries, base) {
				continue
			}
			if suffix == "1" {
				real, _ := s.root.resolve(under(s.root.inside(d.real), name))
				if _, version, _ := splitLibrary(filepath.Base(real)); IsVersion(version) {
					return version
				}
			}
			if IsVersion(suffix) && compareVersions(suffix, newest) > 0 {
				newest = suffix
			}
		}
	}
	return newest
}

// searchDir takes what belongs to the driver by its name.
func (s *libraryScan) searchDir(d *libraryDir) {
	for _, name := range d.names {
		base, suffix, ok := splitLibrary(name)
		if !ok || isXorgModule(base) {
			continue
		}
		row := s.rows[base]
		switch {
		case row != nil && row.ownVersion && isNumbers(suffix):
			s.takeNewest(d, name, base, row)
		case suffix == s.version && suffix != "":
			s.take(d, name, row)
		case row != nil && IsVersion(suffix) && !slices.Contains(s.others[base], suffix):
			s.others[base] = append(s.others[base], suffix)
		}
	}
}

func isXorgModule(base string) bool {
	for _, m := range xorgModules {
		if strings.HasPrefix(m.file, base+".so") {
			return true
		}
	}
	return false
}

// take adds a library, of which the first copy counts.
func (s *libraryScan) take(d *libraryDir, name string, row *libraryRow) {
	f := s.inspect(under(s.root.inside(d.real), name), row)
	first := s.found[name]
	switch {
	case first == nil || f.err == nil && first.err != nil:
		s.found[name] = f
		d.libraries++
	case f.HostPath != first.HostPath:
		first.passedOver = append(first.passedOver, f.HostPath)
	}
}

// takeNewest adds a library with a version of its own, of which the newest counts.
func (s *libraryScan) takeNewest(d *libraryDir, name, base string, row *libraryRow) {
	f := s.inspect(under(s.root.inside(d.real), name), row)
	other := s.found[base]
	if other != nil && f.HostPath == other.HostPath {
		return
	}
	d.libraries++
	if other == nil || f.err == nil && (other.err != nil || compareVersions(f.version(), other.version()) > 0) {
		f, other = other, f
		s.found[base] = other
	}
	if f != nil {
		other.passedOver = append(other.passedOver, f.HostPath)
	}
}

func (f *foundLibrary) version() string {
	_, version, _ := splitLibrary(path.Base(f.Path))
	return version
}

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
