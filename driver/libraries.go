package driver

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
)

// libraryScan searches for libraries, directory by directory.
type libraryScan struct {
	root    root
	version string // the driver's version; if empty, the scan finds it
	rows    map[string]*libraryRow

	dirs []*libraryDir
	seen map[string]bool // real paths of dirs
	// found has the libraries by file name, or by library name for those with ownVersion.
	found map[string]*foundLibrary
	// others are the driver versions of files that were rejected, by library.
	others map[string][]string
	cache  Finding
}

// libraryDir is an existing directory: its path below the root, its real path on the host, and its content.
type libraryDir struct {
	path, real string
	names      []string
	libraries  int // number of driver libraries in it
}

// foundLibrary is a file that has the name of a driver library. `err` says why it cannot be used.
type foundLibrary struct {
	Library
	file string      // the name by which it was found
	row  *libraryRow // nil for a library outside the table
	err  error
	// ignored are the paths of other copies or versions of the library on the host.
	ignored []string
}

func newLibraryScan(r root, version string) *libraryScan {
	s := &libraryScan{
		root: r, version: version,
		rows: map[string]*libraryRow{}, seen: map[string]bool{},
		found: map[string]*foundLibrary{}, others: map[string][]string{},
	}
	for i := range libraryTable {
		s.rows[libraryTable[i].name] = &libraryTable[i]
	}
	return s
}

// run searches directories: `first`, a path on the host that may be empty; then the named ones below the root, the
// directories in the loader's cache and the usual ones. After each directory it searches those to which links in that
// directory point.
func (s *libraryScan) run(first string, named []string) {
	if first != "" && s.root.has(first) {
		s.addDir(s.root.inside(first))
	}
	for _, dir := range named {
		for _, sub := range host.DirLibraries() {
			s.addDir(under(dir, sub))
		}
	}
	for _, dir := range s.cacheDirs() {
		s.addDir(dir)
	}
	for _, dir := range host.LibraryDirs() {
		s.addDir("/" + dir)
	}
	if s.version == "" {
		s.version = s.guessVersion()
	}
	for _, d := range s.dirs {
		s.searchDir(d)
	}
}

// cacheDirs returns the directories that have libraries of the driver according to the loader's cache.
func (s *libraryScan) cacheDirs() []string {
	const file = "/etc/ld.so.cache"
	s.cache = Finding{Name: file, Kind: KindConfig}
	dirs, err := s.readCache(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		s.cache.Note = "not found; the usual directories are searched"
	case err != nil:
		s.cache.Note = err.Error() + "; the usual directories are searched"
	case len(dirs) == 0:
		s.cache.Note = "has no library of the driver"
	default:
		s.cache.Note = "has libraries of the driver in " + strings.Join(dirs, ", ")
	}
	return dirs
}

func (s *libraryScan) readCache(file string) ([]string, error) {
	real, err := s.root.resolve(file)
	if err != nil {
		return nil, err
	}
	data, err := fileio.ReadFile(real, ldcache.MaxSize)
	if err != nil {
		return nil, err
	}
	s.cache.Path = real
	cache, err := ldcache.Parse(data)
	if err != nil {
		return nil, err
	}
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
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

// addDir adds a directory to the search unless it is there already, and the directories to which its links point.
func (s *libraryScan) addDir(dir string) {
	real, err := s.root.resolveDir(dir)
	if err != nil || s.seen[real] {
		return
	}
	s.seen[real] = true
	names, err := readNames(real)
	if err != nil {
		return
	}
	d := &libraryDir{path: dir, real: real, names: names}
	s.dirs = append(s.dirs, d)
	s.followLinks(d)
}

// followLinks adds the directories to which links of core libraries point, such as those of Debian's alternatives, and
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
		if real, err := s.root.resolve(s.pathIn(d, name)); err == nil {
			s.addDir(s.root.inside(filepath.Dir(real)))
		}
	}
	for _, sub := range librarySubdirs {
		if slices.Contains(d.names, sub) {
			s.addDir(under(d.path, sub))
		}
	}
}

// pathIn returns the path, below the root, of a file in a directory.
func (s *libraryScan) pathIn(d *libraryDir, name string) string {
	return under(s.root.inside(d.real), name)
}

// guessVersion returns the version of the library to which a core library's SONAME points, or else the newest version
// of any library.
func (s *libraryScan) guessVersion() string {
	var newest string
	for _, d := range s.dirs {
		for _, name := range d.names {
			base, suffix, ok := splitLibrary(name)
			if !ok || !slices.Contains(coreLibraries, base) {
				continue
			}
			if suffix == "1" {
				real, _ := s.root.resolve(s.pathIn(d, name))
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

// searchDir adds the files whose names are those of driver libraries.
func (s *libraryScan) searchDir(d *libraryDir) {
	for _, name := range d.names {
		base, suffix, ok := splitLibrary(name)
		if !ok || isXorgModule(base) {
			continue
		}
		row := s.rows[base]
		switch {
		case row != nil && row.ownVersion && isNumbers(suffix):
			s.take(d, base, name, row)
		case suffix == s.version && suffix != "":
			s.take(d, name, name, row)
		case row != nil && IsVersion(suffix) && !slices.Contains(s.others[base], suffix):
			s.others[base] = append(s.others[base], suffix)
		}
	}
}

// take adds a library. If several have the same key, the first one counts that can be used and has the newest version.
func (s *libraryScan) take(d *libraryDir, key, name string, row *libraryRow) {
	f, best := s.inspect(s.pathIn(d, name), row), s.found[key]
	if best != nil && f.HostPath == best.HostPath {
		return
	}
	d.libraries++
	version := func(f *foundLibrary) string { _, v, _ := splitLibrary(path.Base(f.Path)); return v }
	switch {
	case best == nil:
		s.found[key] = f
	case f.err == nil && (best.err != nil || compareVersions(version(f), version(best)) > 0):
		f.ignored = append(f.ignored, best.HostPath)
		s.found[key] = f
	default:
		best.ignored = append(best.ignored, f.HostPath)
	}
}

// inspect resolves a path to a library and reads the properties that a container needs.
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
	if f.SONAME, f.err = readSONAME(real); f.err != nil {
		return f
	}
	if !isPlain(f.Path) {
		f.err = fmt.Errorf("its path %q has a character that the hook's arguments cannot carry", f.Path)
		return f
	}
	f.Links = linksOf(f.Library, row)
	return f
}

// linksOf returns the symlinks that a container needs in addition to a library: its SONAME, the name that a linker
// searches for if the host has it too, and the links in the table.
func linksOf(lib Library, row *libraryRow) []Link {
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
		names := strings.NewReplacer("{file}", file, "{soname}", lib.SONAME)
		for _, l := range row.links {
			links[dir+l.Path] = names.Replace(l.Target)
		}
	}
	var list []Link
	for _, p := range slices.Sorted(maps.Keys(links)) {
		list = append(list, Link{p, links[p]})
	}
	return list
}

// readSONAME reads the name by which a shared library is loaded: its SONAME or, if it has none, its file name. The
// error wraps elffile.ErrMachine if the library is for another machine.
func readSONAME(path string) (string, error) {
	f, info, err := fileio.OpenRegular(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	soname, err := parseSONAME(f, info.Size())
	if err != nil {
		return "", err
	}
	if soname == "" {
		return filepath.Base(path), nil
	}
	return soname, nil
}

// parseSONAME parses the SONAME of a library of size bytes. The result is empty if the library has none.
func parseSONAME(r io.ReaderAt, size int64) (string, error) {
	f, err := elffile.ReadLibrary(r, size, elffile.MachineOf(runtime.GOARCH))
	if errors.Is(err, elffile.ErrMachine) {
		return "", err
	}
	if err != nil {
		return "", fmt.Errorf("not a usable ELF file: %w", err)
	}
	soname, err := f.SONAME()
	if err != nil || soname == "" {
		return "", err
	}
	if !fs.ValidPath(soname) || filepath.Base(soname) != soname || !isPlain(soname) {
		return "", fmt.Errorf("SONAME %.100q is not a plain file name", soname)
	}
	return soname, nil
}

// driver returns a driver with the libraries that were found. It has a finding for each of them, for each library of
// the table that was not found, and for the loader's cache.
func (s *libraryScan) driver() *Driver {
	d := &Driver{Version: s.version, shortcomings: s.shortcomings(), Findings: []Finding{s.cache}}
	byRow := map[*libraryRow][]*foundLibrary{}
	for _, f := range s.found {
		byRow[f.row] = append(byRow[f.row], f)
	}
	add := func(list []*foundLibrary) {
		slices.SortFunc(list, func(a, b *foundLibrary) int { return strings.Compare(a.Path, b.Path) })
		for _, f := range list {
			d.Findings = append(d.Findings, f.finding())
			if f.err == nil {
				d.Libraries = append(d.Libraries, f.Library)
			}
		}
	}
	for i := range libraryTable {
		row := &libraryTable[i]
		add(byRow[row])
		if len(byRow[row]) == 0 {
			d.Findings = append(d.Findings, s.missing(row))
		}
	}
	add(byRow[nil])
	return d
}

// broken reports whether the library is for this machine but cannot be used.
func (f *foundLibrary) broken() bool { return f.err != nil && !errors.Is(f.err, elffile.ErrMachine) }

const deadLink = "a link that leads nowhere"

func (f *foundLibrary) finding() Finding {
	row := Finding{
		Name: f.SONAME, Kind: KindLibrary, Capabilities: f.Capabilities,
		Path: f.HostPath, Used: f.err == nil, Broken: f.broken(),
	}
	if f.SONAME == "" {
		row.Name = f.file
	}
	switch {
	case errors.Is(f.err, fs.ErrNotExist):
		row.Note = deadLink
	case f.err != nil:
		row.Note = f.err.Error()
	case len(f.ignored) > 0:
		row.Note = "ignored: " + strings.Join(f.ignored, ", ")
	}
	return row
}

// missing returns the finding about a library of the table that was not found.
func (s *libraryScan) missing(row *libraryRow) Finding {
	f := Finding{Name: row.name, Kind: KindLibrary, Capabilities: row.capabilities, Note: notFound}
	f.Broken = slices.Contains(coreLibraries, row.name)
	if others := s.others[row.name]; len(others) > 0 {
		f.Note = "only of version " + strings.Join(others, ", ")
	}
	if link := s.deadLink(row.name); link != "" {
		f.Broken, f.Path, f.Note = true, link, deadLink
	}
	return f
}

// deadLink returns a link on the host that leads nowhere and has a name by which programs load the library, or "".
func (s *libraryScan) deadLink(base string) string {
	for _, d := range s.dirs {
		for _, name := range d.names {
			if b, suffix, ok := splitLibrary(name); !ok || b != base || !isNumbers(suffix) {
				continue
			}
			if _, _, err := s.root.stat(s.pathIn(d, name)); errors.Is(err, fs.ErrNotExist) {
				return filepath.Join(d.real, name)
			}
		}
	}
	return ""
}
