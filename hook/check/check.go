// Package check examines a container from inside: which of NVIDIA's device nodes it has and can open, and which of the
// driver's libraries its loader finds. It compares that with what the container was given, and says why a GPU cannot be
// used.
//
// What was given is known from inside by the mounts of the driver's files and by the descriptors of devices that
// "gpu-cdi-plugin serve" mounts. The environment says nothing: an image can set it.
//
// Read gathers, Problems is a pure function of that. Nothing is changed. Opening a device node has the effect that it
// has for every program that uses the GPU.
package check

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
)

// Report is what a container has.
type Report struct {
	// Driver is the version of the kernel's driver, or empty if the container does not see it.
	Driver string `json:"driver"`
	// CUDA is the version of the driver to which the CUDA library of the container belongs, or empty.
	CUDA string `json:"cuda"`
	// Nodes are NVIDIA's device nodes, sorted by path.
	Nodes []Node `json:"nodes"`
	// Libraries are those of the driver that the container was given, and the two that every container with a GPU needs.
	Libraries []Library `json:"libraries"`
	// Devices are the GPUs and MIG devices that the descriptors name.
	Devices []Device `json:"devices"`
	// Problems are the differences between what was given and what can be used.
	Problems []Problem `json:"problems"`
}

// Node is a device node.
type Node struct {
	Path string `json:"path"`
	// Error says why the node cannot be opened, or is empty.
	Error string `json:"error,omitempty"`
}

// Library is a library of the driver.
type Library struct {
	// Name is the SONAME, by which programs load it.
	Name string `json:"name"`
	// Given is the path at which it is mounted, or empty.
	Given string `json:"given,omitempty"`
	// Found is the path at which the loader finds a library of that name, or empty.
	Found string `json:"found,omitempty"`

	same bool // Found is the file at Given
}

// Device is a device by its descriptor.
type Device struct {
	UUID     string `json:"uuid"`
	Parent   string `json:"parent,omitempty"`
	Resource string `json:"resource,omitempty"`
}

// Problem is a difference, with what to do about it.
type Problem struct {
	Subject string `json:"subject"`
	Problem string `json:"problem"`
	Fix     string `json:"fix"`
}

// The libraries that every container with a GPU needs.
var needed = []string{"libcuda.so.1", "libnvidia-ml.so.1"}

const (
	maxFile      = 16 << 20
	maxLibrary   = 256 // of the driver
	openTime     = 3 * time.Second
	descriptors  = "/run/gpu/devices"
	maxDevices   = 1024
	maxDeviceDoc = 64 << 10
)

// container is a container whose root is a directory of this process: "/" for its own.
type container struct {
	root string
	host host.Host
}

// Read examines the container with a root directory, "/" for that of this process. An error means that nothing of it
// can be read.
func Read(root string) (*Report, error) {
	h, err := host.New(root, root, root)
	if err != nil {
		return nil, err
	}
	c := &container{root, h}
	r := &Report{Driver: host.DriverVersion(h), Nodes: []Node{}, Libraries: []Library{}, Devices: []Device{}}
	if err := c.readNodes(r); err != nil {
		return nil, fmt.Errorf("list the device nodes: %w", err)
	}
	if err := c.readLibraries(r); err != nil {
		return nil, fmt.Errorf("list the mounted libraries: %w", err)
	}
	if err := c.readDevices(r); err != nil {
		return nil, fmt.Errorf("read the descriptors of devices: %w", err)
	}
	r.Problems = append([]Problem{}, r.problems()...)
	return r, nil
}

// at returns the path in this process of a path in the container.
func (c *container) at(name string) string {
	if c.root == "/" {
		return name
	}
	resolved, err := securejoin.SecureJoin(c.root, name)
	if err != nil {
		return filepath.Join(c.root, name)
	}
	return resolved
}

// nodeName matches the names under /dev of the device nodes of GPUs and of what they need.
var nodeName = regexp.MustCompile(`^(nvidia([0-9]+|ctl|-uvm|-uvm-tools|-modeset)|nvidia-caps/nvidia-cap[0-9]+)$`)

func (c *container) readNodes(r *Report) error {
	for _, dir := range []string{"", "nvidia-caps"} {
		entries, err := os.ReadDir(c.at(path.Join("/dev", dir)))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if name := path.Join(dir, e.Name()); nodeName.MatchString(name) {
				r.Nodes = append(r.Nodes, Node{"/dev/" + name, whyNot(open(filepath.Join(c.at("/dev"), name)))})
			}
		}
	}
	return nil
}

var (
	errNoNode = errors.New("it is not a character device")
	errHangs  = errors.New("opening it does not end")
)

// open opens a device node like the driver's libraries do, and closes it. The driver may never answer; then the
// attempt ends with the process.
func open(name string) error {
	info, err := os.Lstat(name)
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeDevice|fs.ModeCharDevice {
		return errNoNode
	}
	flags := unix.O_RDWR
	if strings.Contains(name, "/nvidia-caps/") {
		flags = unix.O_RDONLY // the driver only wants to see the open file
	}
	done := make(chan error, 1)
	go func() {
		fd, err := unix.Open(name, flags|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
		if err == nil {
			_ = unix.Close(fd)
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(openTime):
		return errHangs
	}
}

// whyNot says in plain words why a device node cannot be opened.
func whyNot(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, unix.EPERM):
		return "the device cgroup of the container does not allow it (EPERM)"
	case errors.Is(err, unix.EACCES):
		return "its permissions, or SELinux, do not allow it to this user (EACCES)"
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return "no driver serves it: the kernel module is not loaded, or the GPU is gone (" + unix.ErrnoName(errno(err)) + ")"
	case errors.Is(err, unix.EIO):
		return "the driver cannot start the GPU (EIO)"
	}
	return err.Error()
}

func errno(err error) unix.Errno {
	e, _ := errors.AsType[unix.Errno](err)
	return e
}

// driverLibrary matches the names of core libraries of the driver, with its version.
var driverLibrary = regexp.MustCompile(`^lib(cuda|nvidia-ml)\.so\.([0-9]+(\.[0-9]+)+)$`)

// readLibraries finds the driver's libraries: those that are mounted, and the needed ones.
func (c *container) readLibraries(r *Report) error {
	given, err := c.mountedLibraries()
	if err != nil {
		return err
	}
	l := newLoader(c)
	for _, file := range given {
		name := c.soname(file)
		if name == "" {
			continue // programs do not load it by a name
		}
		found := l.find(name)
		r.Libraries = append(r.Libraries, Library{name, file, found, c.same(found, file)})
	}
	for _, name := range needed {
		isNamed := func(l Library) bool { return l.Name == name }
		if found := l.find(name); found != "" && !slices.ContainsFunc(r.Libraries, isNamed) {
			r.Libraries = append(r.Libraries, Library{Name: name, Found: found})
		}
	}
	slices.SortFunc(r.Libraries, func(a, b Library) int { return strings.Compare(a.Name, b.Name) })
	for _, library := range r.Libraries {
		if library.Name == needed[0] {
			r.CUDA = c.versionOf(library.Found)
		}
	}
	return nil
}

// mountedLibraries returns the paths of the mounted files that have the version and the directory of a mounted core
// library. Those in other directories are loaded by their path, such as modules of the X server.
func (c *container) mountedLibraries() ([]string, error) {
	data, err := os.ReadFile(c.at("/proc/self/mountinfo"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var points, dirs []string
	version := ""
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			continue
		}
		point := unescape(fields[4])
		if m := driverLibrary.FindStringSubmatch(path.Base(point)); m != nil {
			version, dirs = m[2], append(dirs, path.Dir(point))
		}
		points = append(points, point)
	}
	var list []string
	for _, point := range points {
		base := path.Base(point)
		isLibrary := strings.HasPrefix(base, "lib") && strings.HasSuffix(base, ".so."+version)
		if isLibrary && slices.Contains(dirs, path.Dir(point)) && !slices.Contains(list, point) && len(list) < maxLibrary {
			list = append(list, point)
		}
	}
	return list, nil
}

// unescape replaces the octal numbers by which mountinfo writes blanks and some other bytes.
func unescape(text string) string {
	for i := 0; i+3 < len(text); i++ {
		if text[i] != '\\' {
			continue
		}
		if b, err := strconv.ParseUint(text[i+1:i+4], 8, 8); err == nil {
			text = text[:i] + string(rune(b)) + text[i+4:]
		}
	}
	return text
}

// soname returns the SONAME of a library, or "".
func (c *container) soname(file string) string {
	f, err := os.OpenFile(c.at(file), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return ""
	}
	library, err := elffile.ReadLibrary(f, info.Size(), elffile.MachineOf(runtime.GOARCH))
	if err != nil {
		return ""
	}
	name, _ := library.SONAME() // an error means that the loader finds none either
	return name
}

// same reports whether two paths lead to one file.
func (c *container) same(a, b string) bool {
	first, err := os.Stat(c.at(a))
	second, otherErr := os.Stat(c.at(b))
	return a != "" && err == nil && otherErr == nil && os.SameFile(first, second)
}

// versionOf returns the driver's version in the name of the file to which a path leads, or "".
func (c *container) versionOf(file string) string {
	real, err := filepath.EvalSymlinks(c.at(file))
	if file == "" || err != nil {
		return ""
	}
	if m := driverLibrary.FindStringSubmatch(filepath.Base(real)); m != nil {
		return m[2]
	}
	return ""
}

// loader finds libraries like the container's dynamic loader: in its cache, and then in its default directories. The
// loader of musl has no cache, and the same default directories except those for glibc.
type loader struct {
	c     *container
	cache *ldcache.Cache
	flags int32
}

func newLoader(c *container) *loader {
	l := &loader{c: c}
	l.flags, _ = ldcache.FlagsFor(runtime.GOARCH)
	if data, err := fileio.ReadFile(c.at("/etc/ld.so.cache"), maxFile); err == nil {
		l.cache, _ = ldcache.Parse(data) // the loader ignores a damaged one
	}
	return l
}

func (l *loader) find(name string) string {
	if l.cache != nil {
		if file, ok := l.cache.Lookup(name, l.flags); ok && l.c.isThere(file) {
			return file
		}
	}
	multiarch := host.MachineName() + "-linux-gnu"
	dirs := []string{"/lib/" + multiarch, "/usr/lib/" + multiarch, "/lib64", "/usr/lib64", "/lib", "/usr/lib"}
	for _, dir := range dirs {
		if file := path.Join(dir, name); l.c.isThere(file) {
			return file
		}
	}
	return ""
}

func (c *container) isThere(file string) bool {
	_, err := os.Stat(c.at(file))
	return err == nil
}

// readDevices reads the descriptors. A container without them was given devices by another way than "serve".
func (c *container) readDevices(r *Report) error {
	entries, err := os.ReadDir(c.at(descriptors))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries[:min(len(entries), maxDevices)] {
		if path.Ext(e.Name()) != ".json" {
			continue
		}
		data, err := fileio.ReadFile(c.at(path.Join(descriptors, e.Name())), maxDeviceDoc)
		if err != nil {
			return err
		}
		var d Device
		if err := json.Unmarshal(data, &d); err != nil {
			return fmt.Errorf("%s: %w", e.Name(), err)
		}
		r.Devices = append(r.Devices, d)
	}
	return nil
}
