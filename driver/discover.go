package driver

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// Discover finds the driver's files and device nodes on a host. Version is the version that the driver reports; if it
// is empty, Discover takes the version in the file names.
//
// A missing file that only some drivers have is a finding, not an error. Errors wrap gpu.ErrNoDriver: there is no
// driver below the root, neither libcuda nor libnvidia-ml can be used (ErrDamaged), or no library has the version
// (ErrOtherVersion). Whether the driver can serve a capability is checked by Driver.Check.
func Discover(h host.Host, version string) (*Driver, error) {
	info, err := os.Stat(h.DriverRoot())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", gpu.ErrNoDriver, err)
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%w: %s is not a directory", gpu.ErrNoDriver, h.DriverRoot())
	}
	r := newRoot(h.DriverRoot())
	s := newLibraryScan(r, version)
	s.run(h.Libraries(), h.DriverDirs())
	if err := s.check(); err != nil {
		return nil, err
	}
	d := s.driver()
	s.addModules(d)
	dirs := driverDirs(h, r)
	d.addFiles(r, dirs)
	d.addFirmware(h, r, dirs)
	d.addNodes(h)
	d.addDRM(h)
	d.findMissing()
	slices.SortStableFunc(d.Libraries, func(a, b Library) int { return strings.Compare(a.Path, b.Path) })
	slices.SortStableFunc(d.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return d, nil
}

// IsRoot reports whether a directory is the root of an installation with programs, such as that of a driver container.
// Some hosts have the driver's libraries in a directory that looks like a root, and its programs elsewhere.
func IsRoot(dir string) bool {
	r := newRoot(dir)
	if _, info, err := r.stat("/etc"); err != nil || !info.IsDir() {
		return false
	}
	return slices.ContainsFunc(programDirs, func(programs string) bool {
		_, info, err := r.stat(under(programs, "nvidia-smi"))
		return err == nil && info.Mode().IsRegular()
	})
}

// FindProgram returns the path on the host of a program that belongs to the driver, or "" if it has none of that name.
// Unlike Discover, it needs no libraries.
func FindProgram(h host.Host, name string) string {
	r := newRoot(h.DriverRoot())
	for _, dir := range programDirs {
		if real, info, err := r.stat(under(dir, name)); err == nil && info.Mode().IsRegular() {
			return real
		}
	}
	return ""
}

// driverDirs returns the directories that may have all files of the driver: the named ones, and the one that has the
// directory of the driver's library.
func driverDirs(h host.Host, r root) []string {
	dirs := slices.Clone(h.DriverDirs())
	libraries := h.Libraries()
	if base := path.Base(libraries); (base == "lib" || base == "lib64") && r.has(libraries) {
		dirs = append(dirs, path.Dir(r.inside(libraries)))
	}
	return dirs
}

// findMissing marks the findings about files that were not found, or cannot be used, although their siblings were.
func (d *Driver) findMissing() {
	for i := range d.Findings {
		f := &d.Findings[i]
		name := f.Name
		if f.Kind == KindFirmware {
			name = path.Base(name)
		}
		sibling := siblings[name]
		found := sibling != "" && slices.ContainsFunc(d.Findings, func(other Finding) bool {
			return other.Used && (other.Name == sibling || strings.HasPrefix(other.Name, sibling+".so"))
		})
		if found && !f.Used {
			f.Missing = sibling
		}
	}
}

// Search is a discovery in the background, for example while NVML returns the version.
type Search struct {
	host  host.Host
	done  chan struct{}
	guess *Driver // the driver with the version in the file names; nil after an error
}

// Begin starts a discovery in the background.
func Begin(h host.Host) *Search {
	s := &Search{host: h, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		s.guess, _ = Discover(h, "") // after an error, Driver repeats the discovery
	}()
	return s
}

// Driver waits for the discovery and returns what Discover returns for the version. It repeats the discovery only if
// the version in the file names is another one.
func (s *Search) Driver(version string) (*Driver, error) {
	<-s.done
	if s.guess != nil && s.guess.Version == version {
		return s.guess, nil
	}
	return Discover(s.host, version)
}

// check returns an error if the scan found no core library that can be used.
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
		return fmt.Errorf("%w under %s: %w: %w", gpu.ErrNoDriver, s.root.dir, ErrDamaged, errors.Join(damaged...))
	case len(others) > 0:
		slices.Sort(others)
		return fmt.Errorf("%w under %s: %w: the driver has version %s, the libraries have %s",
			gpu.ErrNoDriver, s.root.dir, ErrOtherVersion, s.version, strings.Join(slices.Compact(others), ", "))
	}
	var searched []string
	for _, d := range s.dirs {
		searched = append(searched, d.path)
	}
	for _, d := range host.LibraryDirs() {
		if d = "/" + d; !slices.Contains(searched, d) {
			searched = append(searched, d)
		}
	}
	return fmt.Errorf("%w under %s: no %s in any of %s",
		gpu.ErrNoDriver, s.root.dir, strings.Join(coreLibraries, " or "), strings.Join(searched, ", "))
}

// shortcomings returns the capabilities that the driver cannot serve, since a core library is missing or damaged.
func (s *libraryScan) shortcomings() []shortcoming {
	var list []shortcoming
	switch f := s.found["libcuda.so."+s.version]; {
	case f != nil && f.broken():
		list = append(list, shortcoming{Compute, fmt.Errorf("%w: %s: %w", ErrDamaged, f.HostPath, f.err)})
	case f == nil || f.err != nil:
		note := s.missing(s.rows["libcuda"]).Note
		list = append(list, shortcoming{Compute, fmt.Errorf("%w under %s: %s", ErrNoCUDA, s.root.dir, note)})
	}
	if f := s.found["libnvidia-ml.so."+s.version]; f != nil && f.broken() {
		list = append(list, shortcoming{Utility, fmt.Errorf("%w: %s: %w", ErrDamaged, f.HostPath, f.err)})
	}
	return list
}
