package rootfs

import (
	"errors"
	"maps"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

func openTree(t *testing.T, path string) *os.File {
	t.Helper()
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestMount(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	w.write("/usr/lib/there", "")
	w.link("usr/lib", "/lib")
	before := image.Digest(t, w.dir)
	mounts := countMounts(t)
	w.root.Record()
	for _, m := range []struct {
		source, target string
		isDir          bool
	}{
		{"/secret", "/usr/lib/there", false},
		{"/secret", "/lib/new", false},
		{"/dir", "/opt/a/b", true},
	} {
		for _, err := range []error{
			w.root.CheckMountPoint(m.target, m.isDir), w.root.MakeMountPoint(m.target, m.isDir),
			w.root.Mount(openTree(t, w.canary+m.source), m.isDir, m.target),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, want := range map[string]string{
		"/usr/lib/there": "secret of the host", "/usr/lib/new": "secret of the host", "/opt/a/b/file": "file of the host",
	} {
		if data, err := os.ReadFile(w.dir + name); string(data) != want {
			t.Errorf("%s has %q, %v", name, data, err)
		}
	}
	if err := w.root.Undo(); err != nil {
		t.Error(err)
	}
	if countMounts(t) != mounts || !maps.Equal(image.Digest(t, w.dir), before) {
		t.Error("something is left after Undo")
	}
}

func TestMountRefuses(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	for _, dir := range []string{"/volume", "/shared", "/proc", "/dir"} {
		w.makeDir(dir, "")
	}
	w.write("/file", "")
	w.link("/proc/version", "/link")
	w.link("/nowhere/file", "/dangling")
	w.bind(t, w.canary, "/volume")
	mountTmpfs(t, w.dir+"/shared", 0)
	if err := unix.Mount("", w.dir+"/shared", "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("proc", w.dir+"/proc", "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(w.dir+"/proc", unix.MNT_DETACH) })
	w.reopen(t, "/dev")
	w.root.TreatTmpfsAsOwn(func(uint64) bool { return false })
	before, mounts := image.Fingerprint(t, w.dir+"/dir"), countMounts(t)
	for name, want := range map[string]string{
		"/dir": "is a directory", "/file/sub": "not a directory", "/volume/new": ErrVolume.Error(),
		"/volume/a/b": ErrVolume.Error(), "/shared/new": ErrShared.Error(), "/shared": "is a directory",
		"/proc/version": "/proc", "/link": "/proc",
	} {
		err := w.root.CheckMountPoint(name, false)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("check %s: %v, want %q", name, err, want)
		}
		err = w.root.MakeMountPoint(name, false)
		if err == nil {
			err = w.root.Mount(openTree(t, w.canary+"/secret"), false, name)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("mount at %s: %v, want %q", name, err, want)
		}
	}
	w.link("/", "/top")
	for _, err := range []error{
		w.root.CheckMountPoint("/top", true), w.root.Mount(openTree(t, w.canary+"/dir"), true, "/top"),
	} {
		if err == nil || !strings.Contains(err.Error(), "it leads to the container's root") {
			t.Errorf("over the root: %v", err)
		}
	}
	if err := w.root.CheckMountPoint("/file", true); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a directory over a file: %v", err)
	}
	if err := w.root.MakeMountPoint("/dangling", false); !errors.Is(err, unix.EEXIST) {
		t.Errorf("at a dangling link: %v", err)
	}
	if countMounts(t) != mounts || image.Fingerprint(t, w.dir+"/dir") != before {
		t.Error("a refused mount was made")
	}
}

// Of two tmpfs, the one that the host has mounted too is a volume.
func TestMountPointsInATmpfs(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	mountTmpfs(t, w.dir+"/run", 0)
	mountTmpfs(t, w.dir+"/volume", 0)
	w.reopen(t, "/dev")
	if err := w.root.MakeMountPoint("/run/a/socket", false); !errors.Is(err, ErrVolume) {
		t.Errorf("without knowledge of the host: %v", err)
	}
	var volume unix.Stat_t
	if err := unix.Stat(w.dir+"/volume", &volume); err != nil {
		t.Fatal(err)
	}
	w.root.TreatTmpfsAsOwn(func(dev uint64) bool { return dev == volume.Dev })
	if err := w.root.MakeMountPoint("/run/a/socket", false); err != nil {
		t.Error(err)
	}
	if err := w.root.MakeMountPoint("/volume/socket", false); !errors.Is(err, ErrVolume) {
		t.Errorf("in a volume: %v", err)
	}
	w.bind(t, w.canary, "/volume")
	if err := w.root.MakeMountPoint("/volume/socket", false); !errors.Is(err, ErrVolume) {
		t.Errorf("in a directory of the host: %v", err)
	}
}
