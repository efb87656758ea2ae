// Package host is a node as a value: where its files are. Every path under /dev, /proc, /sys and the driver's root
// comes from a Host, so that a test, a driver container or a simulated node is just another value.
//
// It builds paths and nothing else; who opens them decides how far to trust what is there.
package host

import (
	"path/filepath"
	"strings"
)

// Host tells where a node's files are. The zero value is not usable; call New.
type Host struct {
	root, driver, dev string
	libraries         string
}

// New returns the host whose /proc and /sys are under root, whose driver installation (libraries, programs, firmware,
// configuration, sockets) is under driverRoot and whose device nodes are under devRoot + "/dev".
// An empty root is "/"; an empty driverRoot or devRoot is root. The paths are made absolute.
func New(root, driverRoot, devRoot string) (Host, error) {
	var h Host
	for _, p := range []struct {
		to         *string
		path, want string
	}{{&h.root, root, "/"}, {&h.driver, driverRoot, root}, {&h.dev, devRoot, root}} {
		path := p.path
		if path == "" {
			path = p.want
		}
		if path == "" {
			path = "/"
		}
		abs, err := filepath.Abs(path)
		if err != nil {
			return Host{}, err
		}
		*p.to = abs
	}
	return h, nil
}

// WithDevRoot is the host with its device nodes under devRoot + "/dev". The path is absolute.
func (h Host) WithDevRoot(devRoot string) Host {
	h.dev = devRoot
	return h
}

// WithLibrary is the host whose driver has its library at an absolute path. If that is in one of LibraryDirs of some
// directory, the driver is installed under that directory; otherwise its libraries are where that one is.
func (h Host) WithLibrary(path string) Host {
	h = h.WithLibraries(filepath.Dir(path))
	longest := ""
	for _, usual := range append(LibraryDirs("x86_64-linux-gnu"), LibraryDirs("aarch64-linux-gnu")...) {
		if strings.HasSuffix(h.libraries, "/"+usual) && len(usual) > len(longest) {
			longest = usual
		}
	}
	if longest != "" {
		h.driver = filepath.Clean("/" + strings.TrimSuffix(h.libraries, longest))
	}
	return h
}

// WithLibraries is the host with a directory, by its absolute path, that is searched first for the driver's libraries.
func (h Host) WithLibraries(dir string) Host {
	h.libraries = dir
	return h
}

// Libraries is the directory of WithLibraries or WithLibrary, or empty.
func (h Host) Libraries() string { return h.libraries }

// LibraryDirs are the directories, relative to the driver's root, in which distributions, NVIDIA's installer, driver
// containers and container hosts have the libraries. Multiarch is Debian's name of the machine, such as
// x86_64-linux-gnu.
func LibraryDirs(multiarch string) []string {
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

// DevRoot is the directory whose dev/ holds the device nodes.
func (h Host) DevRoot() string { return h.dev }

// Proc is a path under /proc.
func (h Host) Proc(elem ...string) string { return join(h.root, "proc", elem) }

// Sys is a path under /sys.
func (h Host) Sys(elem ...string) string { return join(h.root, "sys", elem) }

// Dev is a path under /dev.
func (h Host) Dev(elem ...string) string { return join(h.dev, "dev", elem) }

// Driver is a path under the driver's root.
func (h Host) Driver(elem ...string) string { return join(h.driver, "", elem) }

// InContainer is the path at which a file under the driver's root, the dev root or the root appears in a container:
// the same without that prefix.
func (h Host) InContainer(path string) string {
	for _, root := range []string{h.driver, h.dev, h.root} {
		if root == "/" {
			continue
		}
		if rest, ok := strings.CutPrefix(path, root+"/"); ok {
			return "/" + rest
		}
	}
	return path
}

func join(root, top string, elem []string) string {
	return filepath.Join(append([]string{root, top}, elem...)...)
}
