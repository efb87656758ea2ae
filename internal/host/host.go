// Package host has the paths of a host's files as a value. Every path under /dev, /proc, /sys and the driver's root
// comes from a Host, so that tests, driver containers and simulated hosts only need another value.
//
// A Host builds paths and opens nothing; callers that open the files check whether these can be trusted. Three
// functions read what the kernel reports: DriverVersion, LoadedDriver and ReadLine.
package host

import (
	"cmp"
	"path/filepath"
	"runtime"
	"strings"
)

// Host has the directories of a host's files. The zero value is not usable; call New.
type Host struct {
	root, driver, dev string
	libraries         string
	dirs              []string
}

// New returns the host with /proc and /sys under root, the driver installation (libraries, programs, firmware,
// configuration, sockets) under driverRoot, and device nodes under devRoot + "/dev". An empty root means "/"; an empty
// driverRoot or devRoot means the same as root. The paths are made absolute.
func New(root, driverRoot, devRoot string) (Host, error) {
	rootPath, rootErr := filepath.Abs(cmp.Or(root, "/"))
	driverPath, driverErr := filepath.Abs(cmp.Or(driverRoot, root, "/"))
	devPath, devErr := filepath.Abs(cmp.Or(devRoot, root, "/"))
	if err := cmp.Or(rootErr, driverErr, devErr); err != nil {
		return Host{}, err
	}
	return Host{root: rootPath, driver: driverPath, dev: devPath}, nil
}

// WithDevRoot returns the host with its device nodes under devRoot + "/dev". devRoot must be absolute.
func (h Host) WithDevRoot(devRoot string) Host {
	h.dev = devRoot
	return h
}

// WithLibrary returns the host with the driver to which the library at an absolute path belongs. Libraries are
// searched first in the directory of that library. If the directory ends with one of LibraryDirs, the part before is
// the driver's root.
func (h Host) WithLibrary(path string) Host {
	h = h.WithLibraries(filepath.Dir(path))
	longest := ""
	for _, dir := range append(libraryDirs("x86_64"), libraryDirs("aarch64")...) {
		if strings.HasSuffix(h.libraries, "/"+dir) && len(dir) > len(longest) {
			longest = dir
		}
	}
	if longest != "" {
		h.driver = filepath.Clean("/" + strings.TrimSuffix(h.libraries, longest))
	}
	return h
}

// WithLibraries returns the host with a directory in which driver libraries are searched first. `dir` must be
// absolute.
func (h Host) WithLibraries(dir string) Host {
	h.libraries = dir
	return h
}

// WithDirs returns the host with further directories, below the driver's root, that have files of the driver.
func (h Host) WithDirs(dirs []string) Host {
	h.dirs = dirs
	return h
}

// DriverDirs returns the directories of WithDirs.
func (h Host) DriverDirs() []string { return h.dirs }

// DirLibraries are the directories, relative to one of DriverDirs, that may have libraries.
func DirLibraries() []string { return []string{"", "lib64", "lib"} }

// Libraries returns the directory in which driver libraries are searched first, or "".
func (h Host) Libraries() string { return h.libraries }

// MachineName returns the machine's name as in uname: x86_64 or aarch64, for which NVIDIA has drivers.
func MachineName() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64"
	}
	return "x86_64"
}

// LibraryDirs returns the directories, relative to the driver's root, in which distributions, NVIDIA's installer,
// driver containers and container hosts install libraries for this machine.
func LibraryDirs() []string { return libraryDirs(MachineName()) }

// LoaderDirs returns the directories in which the dynamic loaders of glibc find libraries that their cache lacks: the
// first one with Fedora's, SUSE's and Arch's loaders, the second one with Debian's and Ubuntu's.
func LoaderDirs() []string { return []string{"/usr/lib64", "/usr/lib/" + MachineName() + "-linux-gnu"} }

func libraryDirs(machine string) []string {
	multiarch := machine + "-linux-gnu" // Debian's name for the machine
	return []string{
		"usr/lib64",
		"usr/lib/" + multiarch,
		"usr/lib/" + multiarch + "/nvidia/current",
		"usr/lib64/nvidia",
		"usr/lib/nvidia",
		"usr/lib/nvidia/current",
		"lib64",
		"lib/" + multiarch,
		"lib/" + multiarch + "/nvidia/current",
		"usr/local/nvidia/lib64",
		"usr/local/nvidia/lib",
		"usr/lib",
		"opt/nvidia/lib64",
		"run/opengl-driver/lib",
	}
}

// Root returns the directory above /proc and /sys.
func (h Host) Root() string { return h.root }

// DriverRoot returns the directory in which the driver is installed.
func (h Host) DriverRoot() string { return h.driver }

// Proc returns a path under /proc.
func (h Host) Proc(elem ...string) string { return join(h.root, "proc", elem) }

// Sys returns a path under /sys.
func (h Host) Sys(elem ...string) string { return join(h.root, "sys", elem) }

// Dev returns a path under /dev.
func (h Host) Dev(elem ...string) string { return join(h.dev, "dev", elem) }

// Driver returns a path under the driver's root.
func (h Host) Driver(elem ...string) string { return join(h.driver, "", elem) }

func join(root, top string, elem []string) string {
	return filepath.Join(append([]string{root, top}, elem...)...)
}
