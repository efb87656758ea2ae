// Package host has the paths of a node's files as a value. Every path under /dev, /proc, /sys and the driver's root
// comes from a Host, so that a test, a driver container or a simulated node is another value.
//
// The package only builds paths. The callers that open them check whether they can be trusted.
package host

import (
	"cmp"
	"path/filepath"
	"runtime"
	"strings"
)

// Host has the directories of a node's files. The zero value is not usable; call New.
type Host struct {
	root, driver, dev string
	libraries         string
}

// New returns the host whose /proc and /sys are under root, whose driver installation (libraries, programs, firmware,
// configuration, sockets) is under driverRoot and whose device nodes are under devRoot + "/dev".
// An empty root is "/"; an empty driverRoot or devRoot is root. The paths are made absolute.
func New(root, driverRoot, devRoot string) (Host, error) {
	rootPath, rootErr := filepath.Abs(cmp.Or(root, "/"))
	driverPath, driverErr := filepath.Abs(cmp.Or(driverRoot, root, "/"))
	devPath, devErr := filepath.Abs(cmp.Or(devRoot, root, "/"))
	if err := cmp.Or(rootErr, driverErr, devErr); err != nil {
		return Host{}, err
	}
	return Host{root: rootPath, driver: driverPath, dev: devPath}, nil
}

// WithDevRoot returns the host with its device nodes under devRoot + "/dev". The path is absolute.
func (h Host) WithDevRoot(devRoot string) Host {
	h.dev = devRoot
	return h
}

// WithLibrary returns the host with the driver that has a library at that absolute path. Libraries are searched in its
// directory first. If that ends in one of LibraryDirs, the part before is the driver's root.
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

// WithLibraries returns the host with an absolute directory that is searched first for the driver's libraries.
func (h Host) WithLibraries(dir string) Host {
	h.libraries = dir
	return h
}

// Libraries is the directory that is searched first for the driver's libraries. Empty is none.
func (h Host) Libraries() string { return h.libraries }

// MachineName is the name of this machine as uname prints it. NVIDIA has drivers for these two.
func MachineName() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64"
	}
	return "x86_64"
}

// LibraryDirs are the directories, relative to the driver's root, where distributions, NVIDIA's installer, driver
// containers and container hosts install libraries for this machine.
func LibraryDirs() []string { return libraryDirs(MachineName()) }

func libraryDirs(machine string) []string {
	multiarch := machine + "-linux-gnu" // Debian's name of the machine
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

// Root is the directory that /proc and /sys are under.
func (h Host) Root() string { return h.root }

// DriverRoot is the directory that the driver is installed under.
func (h Host) DriverRoot() string { return h.driver }

// Proc is a path under /proc.
func (h Host) Proc(elem ...string) string { return join(h.root, "proc", elem) }

// Sys is a path under /sys.
func (h Host) Sys(elem ...string) string { return join(h.root, "sys", elem) }

// Dev is a path under /dev.
func (h Host) Dev(elem ...string) string { return join(h.dev, "dev", elem) }

// Driver is a path under the driver's root.
func (h Host) Driver(elem ...string) string { return join(h.driver, "", elem) }

func join(root, top string, elem []string) string {
	return filepath.Join(append([]string{root, top}, elem...)...)
}
