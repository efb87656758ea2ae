package driver

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/host"
)

const (
	hintNoDriver = "install the NVIDIA driver, or say where it is with --driver-root " +
		"(that of a driver container is usually /run/nvidia/driver)"
	hintVersion = "the loaded kernel module and the installed libraries are of different drivers: " +
		"reboot, or reload the module, or install the libraries of the module's version"
	hintDamaged = "install the NVIDIA driver again"
	hintNoCUDA  = "install the NVIDIA driver again with its CUDA library, or leave compute out of --capabilities"
)

// Discover looks for the driver's files and device nodes on a host. Version is what the driver says of itself; if it is
// empty, the names of the files tell it.
//
// What is only sometimes there is never an error but a row in Looked. An error wraps gpu.ErrNoDriver, and has exit status
// 10 and a hint: there is no driver under the root, neither its libcuda nor its libnvidia-ml can be used, or no library
// is of the driver's version. What the driver is good for Driver.Check tells.
func Discover(h host.Host, version string) (*Driver, error) {
	if info, err := os.Stat(h.DriverRoot()); err != nil || !info.IsDir() {
		err = cmp.Or(err, fmt.Errorf("%s is no directory", h.DriverRoot()))
		return nil, exit.With(exit.NoDriver, hintNoDriver, fmt.Errorf("%w: %w", gpu.ErrNoDriver, err))
	}
	m := machineFor(runtime.GOARCH)
	s := newLibraryScan(newRoot(h.DriverRoot()), m, version)
	s.run(h.Libraries())
	if err := s.check(); err != nil {
		return nil, err
	}
	return s.driver(h), nil
}

// Search is a discovery that goes on beside other work, such as to ask the driver for its version.
type Search struct {
	host  host.Host
	done  chan struct{}
	guess *Driver // by the names of files; nil after an error
}

// Begin begins to look for what Discover finds.
func Begin(h host.Host) *Search {
	s := &Search{host: h, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		s.guess, _ = Discover(h, "") // an error comes again with the version
	}()
	return s
}

// Driver is what Discover finds for the version that the driver says of itself. Only where the files' names told another is
// the search repeated.
func (s *Search) Driver(version string) (*Driver, error) {
	<-s.done
	if s.guess != nil && s.guess.Version == version {
		return s.guess, nil
	}
	return Discover(s.host, version)
}

// check is the error of a root whose core libraries cannot be used.
func (s *libraryScan) check() error {
	var damaged []error
	var others []string
	for _, base := range coreLibraries {
		f := s.found[base+".so."+s.version]
		others = append(others, s.others[base]...)
		switch {
		case f == nil:
		case f.err == nil:
			return nil
		case f.broken():
			damaged = append(damaged, fmt.Errorf("%s: %w", f.HostPath, f.err))
		}
	}
	switch {
	case len(damaged) > 0:
		err := fmt.Errorf("%w under %s: %w", gpu.ErrNoDriver, s.root.dir, errors.Join(damaged...))
		return exit.With(exit.NoDriver, hintDamaged, err)
	case len(others) > 0:
		err := fmt.Errorf("%w under %s: the driver is %s, the libraries are of %s",
			gpu.ErrNoDriver, s.root.dir, s.version, strings.Join(slices.Compact(slices.Sorted(slices.Values(others))), ", "))
		return exit.With(exit.NoDriver, hintVersion, err)
	}
	err := fmt.Errorf("%w under %s: no %s in any of %s",
		gpu.ErrNoDriver, s.root.dir, strings.Join(coreLibraries, " or "), strings.Join(s.searched(), ", "))
	return exit.With(exit.NoDriver, hintNoDriver, err)
}

// unusable are the capabilities that the driver's core libraries cannot serve.
func (s *libraryScan) unusable() []shortcoming {
	var list []shortcoming
	add := func(c Capabilities, hint string, err error) {
		list = append(list, shortcoming{c, hint, fmt.Errorf("under %s: %w", s.root.dir, err)})
	}
	if f := s.found["libcuda.so."+s.version]; f == nil || !f.broken() && f.err != nil {
		add(Compute, hintNoCUDA, errors.New("libcuda: "+s.missing(s.rows["libcuda"]).Note))
	} else if f.err != nil {
		add(Compute, hintDamaged, fmt.Errorf("%s: %w", f.HostPath, f.err))
	}
	if f := s.found["libnvidia-ml.so."+s.version]; f != nil && f.broken() {
		add(Utility, hintDamaged, fmt.Errorf("%s: %w", f.HostPath, f.err))
	}
	return list
}

// broken tells whether the library cannot be used although it is one for this machine.
func (f *foundLibrary) broken() bool { return f.err != nil && !errors.Is(f.err, elffile.ErrMachine) }

// searched are the directories that were searched or would have been, had they been there.
func (s *libraryScan) searched() []string {
	var dirs []string
	for _, d := range s.dirs {
		dirs = append(dirs, d.path)
	}
	for _, d := range host.LibraryDirs(s.machine.multiarch) {
		if d = "/" + d; !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	return dirs
}

// driver puts together what was found.
func (s *libraryScan) driver(h host.Host) *Driver {
	d := s.libraries()
	modules, findings := s.xorg()
	d.Libraries = append(d.Libraries, modules...)
	d.Looked = append(d.Looked, findings...)
	slices.SortStableFunc(d.Libraries, func(a, b Library) int { return strings.Compare(a.Path, b.Path) })

	d.Files, findings = findFiles(s.root, s.machine)
	d.Looked = append(d.Looked, findings...)
	firmware, findings := findFirmware(h, s.root, s.version)
	d.Files = append(d.Files, firmware...)
	d.Looked = append(d.Looked, findings...)
	slices.SortStableFunc(d.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })

	d.Control, d.Nodes, findings = findNodes(h)
	d.Looked = append(d.Looked, findings...)
	d.DRM, findings = findDRM(h)
	d.Looked = append(d.Looked, findings...)
	return d
}

// libraries is the driver with nothing but the libraries that the scan has found.
func (s *libraryScan) libraries() *Driver {
	d := &Driver{Version: s.version, unusable: s.unusable()}
	for _, f := range s.sorted() {
		if f.err == nil {
			d.Libraries = append(d.Libraries, f.Library)
		}
	}
	d.Looked = append([]Finding{s.cache}, s.findings()...)
	return d
}

// sorted are the found libraries in the order of the table, those that it does not have behind, by name.
func (s *libraryScan) sorted() []*foundLibrary {
	list := make([]*foundLibrary, 0, len(s.found))
	for _, f := range s.found {
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b *foundLibrary) int {
		return cmp.Or(cmp.Compare(position(a.row), position(b.row)), strings.Compare(a.Path, b.Path))
	})
	return list
}

func position(row *libraryRow) int {
	for i := range libraryTable {
		if row == &libraryTable[i] {
			return i
		}
	}
	return len(libraryTable)
}

// findings has a row for each library that was found and for each of the table that was not.
func (s *libraryScan) findings() []Finding {
	byRow := map[*libraryRow][]*foundLibrary{}
	for _, f := range s.sorted() {
		byRow[f.row] = append(byRow[f.row], f)
	}
	var list []Finding
	for i := range libraryTable {
		row := &libraryTable[i]
		for _, f := range byRow[row] {
			list = append(list, f.finding())
		}
		if len(byRow[row]) == 0 {
			list = append(list, s.missing(row))
		}
	}
	for _, f := range byRow[nil] {
		list = append(list, f.finding())
	}
	return list
}

func (f *foundLibrary) finding() Finding {
	row := Finding{
		Name: cmp.Or(f.SONAME, f.file), Kind: KindLibrary, Capabilities: f.Capabilities,
		Path: f.HostPath, Used: f.err == nil, Broken: f.broken(),
	}
	switch {
	case errors.Is(f.err, fs.ErrNotExist):
		row.Note = "a link that leads nowhere"
	case f.err != nil:
		row.Note = f.err.Error()
	case len(f.passedOver) > 0:
		row.Note = "passed over: " + strings.Join(f.passedOver, ", ")
	}
	return row
}

func (s *libraryScan) missing(row *libraryRow) Finding {
	f := Finding{Name: row.name, Kind: KindLibrary, Capabilities: row.capabilities, Note: notFound}
	f.Broken = slices.Contains(coreLibraries, row.name)
	if others := s.others[row.name]; len(others) > 0 {
		f.Note = "only of version " + strings.Join(others, ", ")
	}
	if link := s.danglingLink(row.name); link != "" {
		f.Broken, f.Path, f.Note = true, link, "a link that leads nowhere"
	}
	return f
}

// danglingLink is a link on the host by whose name programs ask for a library, and which leads to nothing; empty if
// there is none.
func (s *libraryScan) danglingLink(base string) string {
	for _, d := range s.dirs {
		for _, name := range d.names {
			if b, suffix, ok := splitLibrary(name); !ok || b != base || !isNumbers(suffix) {
				continue
			}
			if _, _, err := s.root.stat(under(s.root.inside(d.real), name)); errors.Is(err, fs.ErrNotExist) {
				return filepath.Join(d.real, name)
			}
		}
	}
	return ""
}

func lastElement(p string) string { return p[strings.LastIndexByte(p, '/')+1:] }

// Explain is Looked for a spec with the given capabilities: what they leave out says so.
func (d *Driver) Explain(c Capabilities) []Finding {
	list := slices.Clone(d.Looked)
	for i := range list {
		f := &list[i]
		if f.Used && f.Capabilities != 0 && !c.Needs(f.Capabilities) {
			f.Used, f.Note = false, fmt.Sprintf("for %s, left out for %s", f.Capabilities, c)
		}
		f.Broken = f.Broken && c.Needs(f.Capabilities)
	}
	return list
}
