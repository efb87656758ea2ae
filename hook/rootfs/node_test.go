package rootfs

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// zero is the node of /dev/zero, with owners and permissions of its own.
func zero() Node {
	return Node{Mode: unix.S_IFCHR | 0o640, Device: unix.Mkdev(1, 5), UID: 1000, GID: 2000}
}

func (w *world) checkZero(t *testing.T, name string) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(w.dir, name), &st); err != nil {
		t.Fatal(err)
	}
	n := zero()
	if st.Mode != n.Mode || st.Rdev != n.Device || int(st.Uid) != n.UID || int(st.Gid) != n.GID {
		t.Errorf("%s has mode %o, device %x, owners %d:%d", name, st.Mode, st.Rdev, st.Uid, st.Gid)
	}
	f, err := os.Open(filepath.Join(w.dir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	data := make([]byte, 1)
	if _, err := f.Read(data); err != nil {
		t.Errorf("read %s: %v", name, err)
	}
}

func TestMakeNode(t *testing.T) {
	testenv.Root(t)
	w := newWorld(t)
	w.write("/dev/file", "a file of the image")
	w.link(w.canary+"/secret", "/dev/link")
	if err := unix.Mknod(w.dir+"/dev/stale", unix.S_IFCHR|0o640, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	w.makeDir("/dev/dir", "")
	before := image.Digest(t, w.dir)
	w.root.Record()
	for _, name := range []string{"/dev/new", "/dev/a/b/node", "/dev/file", "/dev/link", "/dev/stale"} {
		if err := errors.Join(w.root.CheckNode(name), w.root.MakeNode(name, zero())); err != nil {
			t.Error(err)
		}
		w.checkZero(t, name)
	}
	if err := w.root.Undo(); err != nil {
		t.Error(err)
	}
	if !maps.Equal(image.Digest(t, w.dir), before) {
		t.Error("something is left after Undo")
	}
	names := len(image.Digest(t, w.dir))
	w.root.Record()
	for _, name := range []string{"/dev/file", "/dev/link", "/dev/stale"} {
		if w.root.HasNode(name, zero()) {
			t.Errorf("%s is taken for the node", name)
		}
		if err := errors.Join(w.root.CheckNode(name), w.root.MakeNode(name, zero())); err != nil {
			t.Error(err)
		}
		w.checkZero(t, name)
		if !w.root.HasNode(name, zero()) {
			t.Errorf("%s is not taken for the node", name)
		}
	}
	if err := w.root.Keep(); err != nil || len(image.Digest(t, w.dir)) != names {
		t.Errorf("%v, or something is left of what was replaced", err)
	}
	for _, err := range []error{w.root.CheckNode("/dev/dir"), w.root.MakeNode("/dev/dir", zero())} {
		if !errors.Is(err, unix.EISDIR) {
			t.Errorf("a directory in place of a node: %v", err)
		}
	}
}

// A node on a volume is used as it is, and none is made there.
func TestNodesOfVolumes(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	volume := t.TempDir()
	if err := unix.Mknod(volume+"/zero", unix.S_IFCHR|0o666, int(zero().Device)); err != nil {
		t.Fatal(err)
	}
	w.makeDir("/dev/dri", "")
	w.bind(t, volume, "/dev/dri")
	mountTmpfs(t, w.dir+"/tmp", unix.MS_NODEV)
	mountTmpfs(t, w.dir+"/ro", unix.MS_RDONLY)
	w.reopen(t, "/dev")
	if !w.root.HasNode("/dev/dri/zero", zero()) {
		t.Error("the volume's node is not seen")
	}
	for _, name := range []string{"/dev/dri/new", "/dev/dri/sub/new"} {
		for _, err := range []error{w.root.CheckNode(name), w.root.MakeNode(name, zero())} {
			if !errors.Is(err, ErrVolume) {
				t.Errorf("%s: %v, want ErrVolume", name, err)
			}
		}
	}
	w.root.TreatTmpfsAsOwn(func(uint64) bool { return false })
	if err := w.root.CheckNode("/tmp/new"); err == nil || !strings.Contains(err.Error(), "nodev") {
		t.Errorf("on a mount with nodev: %v", err)
	}
	for _, err := range []error{w.root.CheckNode("/ro/new"), w.root.CheckMountPoint("/ro/a/new", false)} {
		if !errors.Is(err, unix.EROFS) {
			t.Errorf("on a read-only mount: %v", err)
		}
	}
}

func TestMountNode(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	before := image.Digest(t, w.dir)
	mounts := countMounts(t)
	w.root.Record()
	const name = "/dev/sub/zero"
	for _, err := range []error{
		w.root.CheckMountPoint(name, false), w.root.MakeMountPoint(name, false), w.root.MountNode(name, zero()),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	w.checkZero(t, name)
	if !w.root.HasNode(name, zero()) {
		t.Error("the mounted node is not seen")
	}
	if err := w.root.Undo(); err != nil {
		t.Error(err)
	}
	if countMounts(t) != mounts || !maps.Equal(image.Digest(t, w.dir), before) {
		t.Error("something is left after Undo")
	}
}

// A volume in memory can be mounted at /dev.
func TestNodesOfAVolumeAtDev(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	mountTmpfs(t, w.dir+"/dev", 0)
	w.reopen(t, "/dev")
	w.root.TreatTmpfsAsOwn(func(uint64) bool { return true })
	for _, err := range []error{w.root.CheckNode("/dev/zero"), w.root.MakeNode("/dev/zero", zero())} {
		if !errors.Is(err, ErrVolume) {
			t.Errorf("got %v, want ErrVolume", err)
		}
	}
	w.root.TreatTmpfsAsOwn(func(uint64) bool { return false })
	if err := errors.Join(w.root.CheckNode("/dev/zero"), w.root.MakeNode("/dev/zero", zero())); err != nil {
		t.Errorf("in the container's own: %v", err)
	}
}

// A link to a file of /proc can take the place of the mount point after it was checked. Runtimes write the container's
// security profile there (CVE-2019-16884).
func TestMountNodeRefusesProc(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	w.makeDir("/proc", "")
	w.bind(t, "/proc", "/proc")
	w.reopen(t, "/dev")
	w.link("/proc/version", "/dev/zero")
	mounts := countMounts(t)
	if err := w.root.MountNode("/dev/zero", zero()); err == nil ||
		!strings.Contains(err.Error(), "it leads into /proc") {
		t.Errorf("got %v", err)
	}
	if countMounts(t) != mounts {
		t.Error("the node was mounted")
	}
}
