package driver

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

const testVersion = "580.126.09"

// multiarchDir is where Debian has the libraries.
var multiarchDir = "/usr/lib/" + host.MachineName() + "-linux-gnu"

// tree is a root directory with the files of a driver, which a test writes.
type tree struct {
	t   testing.TB
	dir string
}

func newTree(t testing.TB) *tree { return &tree{t, t.TempDir()} }

// host is a host with the tree as its root, its driver root and its dev root.
func (r *tree) host() host.Host {
	h, err := host.New(r.dir, "", "")
	testenv.Must(r.t, err)
	return h
}

// path makes the directory of a file, and returns the file's path on the host.
func (r *tree) path(p string) string {
	r.t.Helper()
	full := filepath.Join(r.dir, p)
	testenv.Must(r.t, os.MkdirAll(filepath.Dir(full), 0o755))
	return full
}

// library writes a library. Its SONAME is the name up to .so, with .1 if the file has a version.
func (r *tree) library(p string) {
	r.t.Helper()
	name, version, _ := splitLibrary(filepath.Base(p))
	soname := name + ".so"
	if version != "" {
		soname += ".1"
	}
	testenv.Must(r.t, sim.Library{SONAME: soname}.WriteELF(r.path(p)))
}

// core writes libcuda and libnvidia-ml of a version, with their links.
func (r *tree) core(dir, version string) {
	r.t.Helper()
	for _, name := range coreLibraries {
		r.library(dir + "/" + name + ".so." + version)
		r.link(dir+"/"+name+".so.1", name+".so."+version)
	}
}

func (r *tree) link(p, target string) {
	r.t.Helper()
	testenv.Must(r.t, os.Symlink(target, r.path(p)))
}

func (r *tree) file(p, content string, mode os.FileMode) {
	r.t.Helper()
	full := r.path(p)
	testenv.Must(r.t, os.WriteFile(full, []byte(content), mode))
	testenv.Must(r.t, os.Chmod(full, mode))
}

// node makes a character device.
func (r *tree) node(p string) {
	r.t.Helper()
	testenv.Must(r.t, unix.Mknod(r.path(p), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
}

func (r *tree) fifo(p string) {
	r.t.Helper()
	testenv.Must(r.t, unix.Mkfifo(r.path(p), 0o644))
}

// socket makes a socket. Its path in the test's directory may be longer than a socket's address can be.
func (r *tree) socket(p string) {
	r.t.Helper()
	full := r.path(p)
	short, err := os.MkdirTemp("", "s")
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { _ = os.RemoveAll(short) })
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(short, "s"), Net: "unix"})
	testenv.Must(r.t, err)
	l.SetUnlinkOnClose(false)
	testenv.Must(r.t, os.Rename(filepath.Join(short, "s"), full))
	r.t.Cleanup(func() { _ = l.Close() })
}

// cache writes a loader cache with these files.
func (r *tree) cache(paths ...string) {
	r.t.Helper()
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	c := &ldcache.Cache{}
	for _, p := range paths {
		c.Entries = append(c.Entries, ldcache.Entry{Name: filepath.Base(p), Path: p, Flags: flags})
	}
	r.file("/etc/ld.so.cache", string(c.Marshal()), 0o644)
}

// discover calls Discover on a tree with a usable driver.
func (r *tree) discover(version string) *Driver {
	r.t.Helper()
	d, err := Discover(r.host(), version)
	testenv.Must(r.t, err)
	return d
}

func libraryPaths(d *Driver) []string {
	var paths []string
	for _, l := range d.Libraries {
		paths = append(paths, l.Path)
	}
	return paths
}

// finding returns the finding with a name.
func finding(t testing.TB, list []Finding, name string) Finding {
	t.Helper()
	for _, f := range list {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("no finding for %s among %d", name, len(list))
	return Finding{}
}

func sorted(list []string) []string { return slices.Sorted(slices.Values(list)) }

// checkError checks that an error has all of these texts.
func checkError(t testing.TB, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", parts)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not have %q", err, p)
		}
	}
}
