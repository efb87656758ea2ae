package rootfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// world is a root beside a directory that must not change, the canary.
type world struct {
	root           *Root
	dir, canary    string
	canaryHash     string
	makeDir, write func(name, data string)
	link           func(target, name string)
}

func newWorld(t *testing.T) *world {
	t.Helper()
	// The directory for temporary files may be a tmpfs, which a container can have of its own.
	base, err := os.MkdirTemp("/var/tmp", "rootfs-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	w := &world{dir: filepath.Join(base, "root"), canary: filepath.Join(base, "canary")}
	w.makeDir = func(name, _ string) {
		if err := os.MkdirAll(filepath.Join(w.dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	w.write = func(name, data string) {
		w.makeDir(filepath.Dir(name), "")
		if err := os.WriteFile(filepath.Join(w.dir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	w.link = func(target, name string) {
		w.makeDir(filepath.Dir(name), "")
		if err := os.Symlink(target, filepath.Join(w.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	w.makeDir("/", "")
	w.write("../canary/secret", "secret of the host")
	w.write("../canary/dir/file", "file of the host")
	w.canaryHash = image.Fingerprint(t, w.canary)
	if w.root, err = Open(w.dir, "/dev"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = w.root.Close()
		if image.Fingerprint(t, w.canary) != w.canaryHash {
			t.Error("something outside the root has changed")
		}
	})
	return w
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, target := range map[string]string{"link": "/", "loop": "loop"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, path := range map[string]string{
		"the root of the host":   "/",
		"another name for it":    "/proc/../.",
		"a link to it":           filepath.Join(dir, "link"),
		"a magic link to it":     "/proc/self/root",
		"a link loop":            filepath.Join(dir, "loop"),
		"nothing":                "",
		"a file":                 "/etc/passwd",
		"a path that is missing": filepath.Join(dir, "missing"),
	} {
		t.Run(name, func(t *testing.T) {
			if r, err := Open(path, "/dev"); err == nil {
				t.Errorf("Open(%q) = %v, want an error", path, r)
			}
		})
	}
}

func TestReadStaysInRoot(t *testing.T) {
	w := newWorld(t)
	w.write("/inside", "inside")
	w.write(w.canary+"/secret", "the root's own")
	w.link("../../../../../../inside", "/up")
	w.link(w.canary+"/secret", "/absolute")
	w.link("../canary/secret", "/sideways")
	w.link("/inside", "/sub/link")
	w.link("loop", "/loop")
	for name, want := range map[string]string{
		"/inside":                  "inside",
		"/up":                      "inside",
		"/sub/link":                "inside",
		"/absolute":                "the root's own",
		"/sideways":                "",
		"/loop":                    "",
		"/../../canary/secret":     "",
		"/../" + w.canary + "/dir": "",
	} {
		got, err := w.root.ReadFile(name, 1000)
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("ReadFile(%q) = %q, %v, want %q", name, got, err, want)
		}
	}
}

// tooLarge reports whether a file was not read because it is too large.
func tooLarge(err error) bool {
	return err != nil && strings.Contains(err.Error(), " bytes, the limit is ")
}

func TestReadOnlyRegularFiles(t *testing.T) {
	testenv.Root(t)
	w := newWorld(t)
	w.makeDir("/dir", "")
	if err := unix.Mkfifo(filepath.Join(w.dir, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, kind := range map[string]uint32{
		"character": unix.S_IFCHR, "block": unix.S_IFBLK, "socket": unix.S_IFSOCK,
	} {
		if err := unix.Mknod(filepath.Join(w.dir, name), kind|0o644, int(unix.Mkdev(0, 0))); err != nil {
			t.Fatal(err)
		}
	}
	w.link("fifo", "/link")
	for name, want := range map[string]string{
		"/dir": "a directory", "/fifo": "a FIFO", "/link": "a FIFO", "/socket": "a socket",
		"/character": "a character device", "/block": "a block device",
	} {
		_, err := w.root.ReadFile(name, 1000)
		if !errors.Is(err, ErrNotRegular) || !strings.HasSuffix(err.Error(), "but "+want) ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("ReadFile(%q): %v, want ErrNotRegular with %q", name, err, want)
		}
		if w.root.IsFile(name) {
			t.Errorf("IsFile(%q) is true", name)
		}
	}
	w.write("/large", "")
	if err := os.Truncate(filepath.Join(w.dir, "large"), 4<<30); err != nil {
		t.Fatal(err)
	}
	if _, err := w.root.ReadFile("/large", 1000); !tooLarge(err) {
		t.Errorf("ReadFile of 4 GiB: %v, want one about the limit", err)
	}
}

// A hard link leads to a file outside the root where both are on one file system.
func TestHardLinksToSecretsAreNotRead(t *testing.T) {
	w := newWorld(t)
	w.write("/once", "own")
	if err := os.Link(w.canary+"/secret", w.dir+"/linked"); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		mode     os.FileMode
		readable bool
	}{"/linked": {0o640, false}, "/once": {0o600, true}} {
		if err := os.Chmod(w.dir+name, tc.mode); err != nil {
			t.Fatal(err)
		}
		if data, err := w.root.ReadFile(name, 1000); (err == nil) != tc.readable || (data != nil) != tc.readable {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	if err := os.Chmod(w.dir+"/linked", 0o644); err != nil {
		t.Fatal(err)
	}
	if data, err := w.root.ReadFile("/linked", 1000); err != nil {
		t.Errorf("one that every user can read: %q, %v", data, err)
	}
}

func TestMagicLinksAreRefused(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	w.makeDir("/proc", "")
	if err := unix.Mount("proc", filepath.Join(w.dir, "proc"), "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(filepath.Join(w.dir, "proc"), unix.MNT_DETACH) }()
	w.link("/proc/self/root"+w.canary+"/secret", "/secret")
	w.link("/proc/self/root"+w.canary, "/dir")
	if data, err := w.root.ReadFile("/secret", 1000); err == nil || errors.Is(err, ErrVolume) {
		t.Errorf("read %q, %v through a magic link, want an error before the file is reached", data, err)
	}
	if err := w.root.WriteFile("/dir/file", []byte("x"), 0o644); err == nil {
		t.Error("wrote through a magic link")
	}
}

func TestSymlink(t *testing.T) {
	for name, tc := range map[string]struct {
		setup func(w *world)
		path  string
		want  string // the path below the root at which the link is; empty for an error
	}{
		"nothing is there": {path: "/a/b/link", want: "a/b/link"},
		"a wrong link is there": {
			setup: func(w *world) { w.link("../canary/secret", "/link") }, path: "/link", want: "link",
		},
		"a file is there": {
			setup: func(w *world) { w.write("/link", "file") }, path: "/link", want: "link",
		},
		"a directory is there":             {setup: func(w *world) { w.makeDir("/link", "") }, path: "/link"},
		"the directory is a file":          {setup: func(w *world) { w.write("/a", "file") }, path: "/a/link"},
		"the directory is a dangling link": {setup: func(w *world) { w.link("missing", "/a") }, path: "/a/link"},
		"the directory is a link inside": {
			setup: func(w *world) { w.makeDir("/b", ""); w.link("/b", "/a") }, path: "/a/link", want: "b/link",
		},
		"the directory is a link outside": {setup: func(w *world) { w.link(w.canary, "/a") }, path: "/a/link"},
		"the directory climbs outside":    {setup: func(w *world) { w.link("../canary", "/a") }, path: "/a/link"},
		"a parent climbs outside":         {setup: func(w *world) { w.link("../canary", "/a") }, path: "/a/dir/link"},
		"the directory climbs to the root": {
			setup: func(w *world) { w.link("../../..", "/a") }, path: "/a/link", want: "link",
		},
		"a name as long as names can be": {path: "/" + strings.Repeat("x", 255), want: strings.Repeat("x", 255)},
		"a chain of links without an end": {
			setup: func(w *world) { w.link("b", "/a"); w.link("a", "/b") }, path: "/a/link",
		},
		"a FIFO is there": {
			setup: func(w *world) { _ = unix.Mkfifo(filepath.Join(w.dir, "link"), 0o600) }, path: "/link", want: "link",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if tc.setup != nil {
				tc.setup(w)
			}
			err := w.root.Symlink("to/target", tc.path)
			if (err == nil) != (tc.want != "") {
				t.Fatalf("Symlink: %v, want an error: %v", err, tc.want == "")
			}
			if err != nil {
				if !strings.Contains(err.Error(), tc.path) || errors.Is(err, unix.EBADF) {
					t.Errorf("error %q does not name %s, or is about a handle", err, tc.path)
				}
				return
			}
			if got, err := os.Readlink(filepath.Join(w.dir, tc.want)); got != "to/target" {
				t.Errorf("the link contains %q, %v", got, err)
			}
			before := image.Fingerprint(t, w.dir)
			if err := w.root.Symlink("to/target", tc.path); err != nil {
				t.Fatal(err)
			}
			if image.Fingerprint(t, w.dir) != before {
				t.Error("the second time changed something")
			}
		})
	}
}

// An engine that gives a library by mounts mounts one file under two names; a hard link has the same file too. A link
// in place of the second name would change nothing, and replacing a mount point fails.
func TestSymlinkKeepsTheTargetUnderAnotherName(t *testing.T) {
	for name, c := range map[string]struct {
		target string
		kept   bool
	}{
		"the file itself":              {"lib.so.1.2", true},
		"the file by an absolute path": {"/lib/lib.so.1.2", true},
		"a link to the file":           {"lib.so.1", true},
		"another file":                 {"other", false},
		"a file that does not exist":   {"missing", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.write("/lib/lib.so.1.2", "library")
			w.write("/lib/other", "library")
			w.link("lib.so.1.2", "/lib/lib.so.1")
			lib := filepath.Join(w.dir, "lib")
			testenv.Must(t, os.Link(filepath.Join(lib, "lib.so.1.2"), filepath.Join(lib, "lib.so")))
			testenv.Must(t, w.root.Symlink(c.target, "/lib/lib.so"))
			if link, err := os.Readlink(filepath.Join(lib, "lib.so")); (err != nil) != c.kept || !c.kept && link != c.target {
				t.Errorf("the link contains %q, %v; want the file to be kept: %v", link, err, c.kept)
			}
		})
	}
}

func TestWriteFile(t *testing.T) {
	for name, tc := range map[string]struct {
		setup func(w *world)
		fails bool
	}{
		"nothing is there":         {},
		"another file is there":    {setup: func(w *world) { w.write("/etc/f", "other") }},
		"the file, another mode":   {setup: func(w *world) { w.write("/etc/f", "new") }},
		"a link to an equal file":  {setup: func(w *world) { w.write("/etc/abc", "new"); w.link("abc", "/etc/f") }},
		"a link to the host":       {setup: func(w *world) { w.link(w.canary+"/secret", "/etc/f") }},
		"a link that climbs":       {setup: func(w *world) { w.link("../../canary/secret", "/etc/f") }},
		"a link to a file in root": {setup: func(w *world) { w.write("/other", "other"); w.link("/other", "/etc/f") }},
		"a FIFO": {
			setup: func(w *world) { w.makeDir("/etc", ""); _ = unix.Mkfifo(w.dir+"/etc/f", 0o600) },
		},
		"a directory":             {setup: func(w *world) { w.makeDir("/etc/f", "") }, fails: true},
		"its directory is a link": {setup: func(w *world) { w.link("../canary", "/etc") }, fails: true},
		"its directory is a file": {setup: func(w *world) { w.write("/etc", "") }, fails: true},
		"a hard link to the canary": {
			setup: func(w *world) { w.makeDir("/etc", ""); _ = os.Link(w.canary+"/dir/file", w.dir+"/etc/f") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if tc.setup != nil {
				tc.setup(w)
			}
			w.canaryHash = image.Fingerprint(t, w.canary)
			before := image.Fingerprint(t, w.dir)
			err := w.root.WriteFile("/etc/f", []byte("new"), 0o444)
			if tc.fails {
				if err == nil || !strings.Contains(err.Error(), "/etc/f") || image.Fingerprint(t, w.dir) != before {
					t.Errorf("got %v, want an error that names the file, and no change", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			checkFile(t, w.dir+"/etc/f", "new", 0o444)
			if data, err := os.ReadFile(w.dir + "/other"); err == nil && string(data) != "other" {
				t.Errorf("wrote %q through a link", data)
			}
			before = image.Fingerprint(t, w.dir)
			if err := w.root.WriteFile("/etc/f", []byte("new"), 0o444); err != nil {
				t.Fatal(err)
			}
			if image.Fingerprint(t, w.dir) != before {
				t.Error("the second time changed something")
			}
		})
	}
}

func TestWriteFileLeavesNothingOnAFullFileSystem(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	if err := unix.Mount("tmpfs", w.dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(w.dir, unix.MNT_DETACH) })
	w.write("/etc/f", "of the image")
	w.reopen(t, "/dev")
	before := image.Fingerprint(t, w.dir+"/etc/f")
	err := w.root.WriteFile("/etc/f", make([]byte, 1<<16), 0o644)
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "/etc/f") {
		t.Errorf("WriteFile: %v, want ENOSPC with the name", err)
	}
	if names, _ := os.ReadDir(w.dir + "/etc"); len(names) != 1 || image.Fingerprint(t, w.dir+"/etc/f") != before {
		t.Errorf("left %v, want the file as it was", names)
	}
}

func checkFile(t *testing.T, path, data string, mode fs.FileMode) {
	t.Helper()
	i, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if i.Mode() != mode {
		t.Errorf("mode of %s is %v, want %v", path, i.Mode(), mode)
	}
	if got, err := os.ReadFile(path); string(got) != data {
		t.Errorf("%s contains %q, %v, want %q", path, got, err, data)
	}
}

// Another process swaps a directory for a link out of the root.
func TestRaceWithALinkThatAppears(t *testing.T) {
	w := newWorld(t)
	w.makeDir("/etc", "")
	w.link("../canary", "/link")
	stop := make(chan struct{})
	var swapper sync.WaitGroup
	swapper.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, w.dir+"/etc", unix.AT_FDCWD, w.dir+"/link", unix.RENAME_EXCHANGE)
			}
		}
	})
	var written, refused int
	for i := range 5000 {
		data := []byte{byte(i), byte(i >> 8)}
		if err := w.root.WriteFile("/etc/secret", data, 0o644); err == nil {
			written++
		} else {
			refused++
		}
		_ = w.root.Symlink(string('a'+rune(i%26)), "/etc/dir/file")
		if got, err := w.root.ReadFile("/etc/secret", 1000); err == nil && len(got) > 2 {
			t.Fatalf("read %q of the host", got)
		}
	}
	close(stop)
	swapper.Wait()
	if written == 0 || refused == 0 {
		t.Errorf("%d written, %d refused: the swap never happened during a call", written, refused)
	}
}

func mountTmpfs(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", flags, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// bind mounts a file or a directory over one in the root.
func (w *world) bind(t *testing.T, from, to string) {
	t.Helper()
	if err := unix.Mount(from, filepath.Join(w.dir, to), "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(filepath.Join(w.dir, to), unix.MNT_DETACH) })
}

// reopen opens the root after mounts were added, as the hook does.
func (w *world) reopen(t *testing.T, hostDev string) {
	t.Helper()
	root, err := Open(w.dir, hostDev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	w.root = root
}

// A file on another mount is not read, whatever path leads there.
func TestReadsOnlyTheRootsOwnMount(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	for _, dir := range []string{"/volume", "/secret", "/proc", "/sys", "/dev"} {
		w.makeDir(dir, "")
	}
	w.write("/own", "own")
	w.write("/over", "below")
	w.bind(t, w.canary, "/volume")
	w.bind(t, w.canary+"/secret", "/over")
	mountTmpfs(t, w.dir+"/secret", 0)
	mountTmpfs(t, w.dir+"/dev", 0)
	w.write("/secret/v1/token", "secret")
	w.write("/dev/file", "in /dev")
	w.link("v1", "/secret/data")
	for _, kind := range []string{"proc", "sysfs"} {
		dir := w.dir + "/" + strings.TrimSuffix(kind, "fs")
		if err := unix.Mount(kind, dir, kind, 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
	w.link("/volume/secret", "/link-to-volume")
	w.link("/secret/data/token", "/link-to-secret")
	w.link("/volume", "/link-to-directory")
	w.reopen(t, "/dev")
	for _, name := range []string{
		"/volume/secret", "/link-to-volume", "/link-to-directory/secret", "/secret/data/token", "/link-to-secret",
		"/over", "/proc/version", "/proc/self/environ", "/sys/kernel/notes", "/dev/file",
	} {
		if data, err := w.root.ReadFile(name, 1<<20); !errors.Is(err, ErrVolume) ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("ReadFile(%q) = %q, %v, want ErrVolume with the name", name, data, err)
		}
		if f, err := w.root.OpenFile(name); !errors.Is(err, ErrVolume) {
			t.Errorf("OpenFile(%q) = %v, %v, want ErrVolume", name, f, err)
		}
	}
	for _, name := range []string{"/volume", "/link-to-directory", "/secret/data", "/proc", "/sys/kernel"} {
		if names, err := w.root.ReadDir(name, 10); !errors.Is(err, ErrVolume) || !strings.Contains(err.Error(), name) {
			t.Errorf("ReadDir(%q) = %q, %v, want ErrVolume with the name", name, names, err)
		}
	}
	if data, err := w.root.ReadFile("/own", 10); string(data) != "own" {
		t.Errorf("ReadFile of the root's own: %q, %v", data, err)
	}
	if names, err := w.root.ReadDir("/dev", 10); len(names) != 1 {
		t.Errorf("ReadDir of the container's own /dev: %q, %v", names, err)
	}
}

// A lower layer of an overlay is on another file system, and often on another device, but on the root's mount.
func TestReadsLowerLayers(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	layers := t.TempDir()
	for _, dir := range []string{"/a", "/b", "/upper"} {
		mountTmpfs(t, layers+dir, 0)
	}
	for name, data := range map[string]string{"/a/file": "of a", "/b/file": "hidden", "/b/dir/file": "of b"} {
		if err := os.MkdirAll(filepath.Dir(layers+name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(layers+name, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(layers+"/upper/u", 0o755), os.Mkdir(layers+"/upper/w", 0o755)); err != nil {
		t.Fatal(err)
	}
	options := strings.ReplaceAll("lowerdir=L/a:L/b,upperdir=L/upper/u,workdir=L/upper/w", "L", layers)
	if err := unix.Mount("overlay", w.dir, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(w.dir, unix.MNT_DETACH) })
	w.reopen(t, "/dev")
	for range 2 {
		for name, want := range map[string]string{"/file": "of a", "/dir/file": "of b"} {
			if got, err := w.root.ReadFile(name, 100); string(got) != want {
				t.Errorf("ReadFile(%q) = %q, %v, want %q", name, got, err, want)
			}
		}
		if err := w.root.WriteFile("/dir/new", []byte("x"), 0o644); err != nil { // makes an upper layer
			t.Error(err)
		}
	}
}

func TestReadCover(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	mountTmpfs(t, w.dir+"/secret", 0)
	w.write("/secret/token", "secret")
	for _, name := range []string{"/own", "/over", "/bound"} {
		w.write(name, "below")
	}
	w.bind(t, "/proc/version", "/bound")
	if err := w.root.MountFile("/over", []byte("cover"), 0o444); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(w.dir+"/over", unix.MNT_DETACH) }()
	if data, err := w.root.ReadCover("/over", 5); string(data) != "cover" {
		t.Errorf("of a file that MountFile mounted: %q, %v", data, err)
	}
	if data, err := w.root.ReadCover("/over", 4); !tooLarge(err) {
		t.Errorf("of more than the limit: %q, %v", data, err)
	}
	for _, name := range []string{"/own", "/secret/token", "/bound"} {
		if data, err := w.root.ReadCover(name, 1<<16); err == nil || data != nil {
			t.Errorf("ReadCover(%q) = %q, %v, want an error", name, data, err)
		}
	}
}

func TestVolumesAreNotChanged(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	w.makeDir("/volume", "")
	w.bind(t, w.canary, "/volume")
	mountTmpfs(t, w.dir+"/dev", 0)
	mountTmpfs(t, w.dir+"/dev/shm", 0)
	for _, dir := range []string{"/dev/dri", "/dev/linked"} {
		w.makeDir(dir, "")
	}
	w.bind(t, w.canary, "/dev/dri")
	w.link("/volume", "/etc")
	w.link("/volume", "/dev/out")
	w.link("../../volume", "/dev/linked/by-path")
	w.reopen(t, t.TempDir())
	for _, name := range []string{
		"/volume/secret", "/volume/new", "/etc/new", "/volume/new/sub/file", "/volume/dir/file",
		"/dev/dri/new", "/dev/dri/by-path/new", "/dev/out/new", "/dev/linked/by-path/new", "/dev/shm/new",
	} {
		if err := w.root.WriteFile(name, []byte("x"), 0o644); !errors.Is(err, ErrVolume) {
			t.Errorf("WriteFile(%q): %v, want ErrVolume", name, err)
		}
		if err := w.root.Symlink("x", name); !errors.Is(err, ErrVolume) {
			t.Errorf("Symlink(%q): %v, want ErrVolume", name, err)
		}
	}
	if err := w.root.Symlink("x", "/dev/own/by-path/y"); err != nil {
		t.Errorf("in the container's own /dev: %v", err)
	}
}

func TestAnotherMountAtDevIsNotTheContainersOwn(t *testing.T) {
	testenv.Root(t)
	for name, mount := range map[string]func(t *testing.T, w *world) (hostDev string){
		"the host's": func(t *testing.T, w *world) string {
			host := t.TempDir()
			mountTmpfs(t, host, 0)
			w.makeDir("/dev", "")
			w.bind(t, host, "/dev")
			return host
		},
		"a volume that is no tmpfs": func(t *testing.T, w *world) string {
			w.makeDir("/dev", "")
			w.bind(t, "/proc/self", "/dev")
			return "/dev"
		},
		"a link to a tmpfs": func(t *testing.T, w *world) string {
			mountTmpfs(t, w.dir+"/volume", 0)
			w.link("volume", "/dev")
			return "/dev"
		},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.MountNamespace(t)
			w := newWorld(t)
			w.reopen(t, mount(t, w))
			if err := w.root.Symlink("x", "/dev/new"); !errors.Is(err, ErrVolume) {
				t.Errorf("Symlink: %v, want ErrVolume", err)
			}
			if names, err := w.root.ReadDir("/dev", 10); !errors.Is(err, ErrVolume) {
				t.Errorf("ReadDir: %q, %v, want ErrVolume", names, err)
			}
		})
	}
}

func TestCheckContainer(t *testing.T) {
	testenv.Root(t)
	check := func(t *testing.T, dir, want string) {
		t.Helper()
		r, err := Open(dir, "/dev")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Close() }()
		if err := r.CheckContainer(); (err == nil) != (want == "") || err != nil &&
			!strings.Contains(err.Error(), want) {
			t.Errorf("CheckContainer of %s: %v, want %q", dir, err, want)
		}
	}
	check(t, "/proc", "in the host's mount namespace")
	testenv.MountNamespace(t)
	check(t, "/proc", "")
	dir := t.TempDir()
	check(t, dir, "not a mount point")
	testenv.MountPoint(t, dir)
	check(t, dir, "")
	check(t, dir+"/..", "not a mount point")
}

func TestMountIDFromProc(t *testing.T) {
	for _, name := range []string{"/", "/proc", "/proc/self/status", "/dev/null"} {
		f, err := os.OpenFile(name, unix.O_PATH, 0)
		if err != nil {
			t.Fatal(err)
		}
		want, err := mountID(f)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := mountIDFromProc(f); got != want || err != nil {
			t.Errorf("%s: %d, %v, want %d", name, got, err, want)
		}
		_ = f.Close()
	}
}

// If the kernel cannot describe a file, that is an error, not the zero value, which would be a regular file.
func TestAClosedFileIsAnError(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if id, err := mountID(f); err == nil {
		t.Errorf("mountID = %d, want an error", id)
	}
	if err := checkCover(f); err == nil {
		t.Error("checkCover: no error")
	}
	if _, err := openRegular(f, "closed"); err == nil {
		t.Error("openRegular: no error")
	}
}

func TestReadHostFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		make func(path string) error
		want error // nil is one about the limit
	}{
		"a link":      {func(path string) error { return os.Symlink(file, path) }, ErrNotRegular},
		"a FIFO":      {func(path string) error { return unix.Mkfifo(path, 0o644) }, ErrNotRegular},
		"a directory": {func(path string) error { return os.Mkdir(path, 0o755) }, ErrNotRegular},
		"too large":   {func(path string) error { return os.WriteFile(path, []byte("12345678"), 0o644) }, nil},
		"sparse": {
			func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, 1<<40)) },
			nil,
		},
		"missing": {func(string) error { return nil }, os.ErrNotExist},
	} {
		path := filepath.Join(dir, name)
		if err := tc.make(path); err != nil {
			t.Fatal(err)
		}
		data, err := ReadHostFile(path, 7)
		ok := tooLarge(err)
		if tc.want != nil {
			ok = errors.Is(err, tc.want)
		}
		if !ok || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %q, %v, want %v with the path", name, data, err, tc.want)
		}
	}
	if data, err := ReadHostFile(file, 7); string(data) != "content" {
		t.Errorf("a file of the limit's size: %q, %v", data, err)
	}
	if data, err := ReadHostFile("/proc/self/mountinfo", 1<<20); !strings.Contains(string(data), " / ") {
		t.Errorf("a file of the size 0 with content: %q, %v", data, err)
	}
}

func TestMountFile(t *testing.T) {
	testenv.Root(t)
	for name, old := range map[string]bool{"detached": false, "as before Linux 6.15": true} {
		t.Run(name, func(t *testing.T) {
			testenv.MountNamespace(t)
			w := newWorld(t)
			w.write("/etc/f", "of the image")
			w.link("etc/f", "/link")
			mounts := countMounts(t)
			if old {
				mountAttached(t, w.root, "/link", "new")
			} else if err := w.root.MountFile("/link", []byte("new"), 0o444); err != nil {
				t.Fatal(err)
			}
			checkFile(t, w.dir+"/etc/f", "new", 0o444)
			if n := countMounts(t); n != mounts+1 {
				t.Errorf("%d mounts were added, want 1", n-mounts)
			}
			if err := os.WriteFile(w.dir+"/etc/f", []byte("x"), 0o644); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing to it: %v, want EROFS", err)
			}
			if err := w.root.MountFile("/etc/f", []byte("new"), 0o444); err != nil || countMounts(t) != mounts+1 {
				t.Errorf("the second time: %v, %d mounts more", err, countMounts(t)-mounts)
			}
			if err := unix.Unmount(w.dir+"/etc/f", 0); err != nil {
				t.Fatal(err)
			}
			checkFile(t, w.dir+"/etc/f", "of the image", 0o644)
		})
	}
}

// With SELinux a container may not be allowed to read a file with the label of a tmpfs.
func TestMountFileCopiesTheLabel(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	mountTmpfs(t, w.dir, 0) // which supports labels
	w.write("/etc/f", "of the image")
	const label = "system_u:object_r:container_file_t:s0:c1,c2\x00"
	if err := unix.Setxattr(w.dir+"/etc/f", "security.selinux", []byte(label), 0); err != nil {
		testenv.Skip(t, "the label of a file cannot be set: "+err.Error())
	}
	r, err := Open(w.dir, "/dev")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := r.MountFile("/etc/f", []byte("new"), 0o444); err != nil {
		t.Fatal(err)
	}
	checkFile(t, w.dir+"/etc/f", "new", 0o444)
	got := make([]byte, 100)
	if n, err := unix.Getxattr(w.dir+"/etc/f", "security.selinux", got); err != nil || string(got[:n]) != label {
		t.Errorf("label %q, %v, want that of the file below", got[:max(n, 0)], err)
	}
}

// A mount in a volume with mount propagation would appear on the host.
func TestMountFileDoesNotPropagate(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	host := t.TempDir()
	mountTmpfs(t, host, 0)
	if err := unix.Mount("", host, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(host+"/ld.so.cache", []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.makeDir("/volume", "")
	if err := unix.Mount(host, w.dir+"/volume", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(w.dir+"/volume", unix.MNT_DETACH) }()
	w.link("/volume", "/etc")
	mounts := countMounts(t)
	for _, name := range []string{"/etc/ld.so.cache", "/volume/ld.so.cache"} {
		if err := w.root.MountFile(name, []byte("new"), 0o444); !errors.Is(err, ErrShared) ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("MountFile(%q): %v, want ErrShared with the name", name, err)
		}
	}
	if n := countMounts(t); n != mounts {
		t.Errorf("%d mounts were left", n-mounts)
	}
	checkFile(t, host+"/ld.so.cache", "of the host", 0o644)
	// A slave mount receives mounts and does not propagate any.
	if err := unix.Mount("", w.dir+"/volume", "", unix.MS_SLAVE, ""); err != nil {
		t.Fatal(err)
	}
	w.reopen(t, "/dev")
	if err := w.root.MountFile("/etc/ld.so.cache", []byte("new"), 0o444); err != nil {
		t.Error(err)
	}
	checkFile(t, w.dir+"/volume/ld.so.cache", "new", 0o444)
	checkFile(t, host+"/ld.so.cache", "of the host", 0o644)
}

func mountAttached(t *testing.T, r *Root, name, data string) {
	t.Helper()
	tmpfs, err := newTmpfs(len(data), mountAttrs)
	if err != nil {
		t.Fatal(err)
	}
	defer closeQuietly(tmpfs)
	if err := create(tmpfs, "file", []byte(data), 0o444); err != nil {
		t.Fatal(err)
	}
	tree, err := r.openAttached(tmpfs, "file")
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(tree), "file")
	defer closeQuietly(file)
	target, err := r.open(name, unix.O_PATH)
	if err != nil {
		t.Fatal(err)
	}
	defer closeQuietly(target)
	if err := r.attach(file, target, mountAttrs); err != nil {
		t.Fatal(err)
	}
}

func countMounts(t *testing.T) int {
	t.Helper()
	data, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(data), "\n")
}

func TestMountFileRefuses(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	w := newWorld(t)
	w.makeDir("/dir", "")
	w.makeDir("/proc", "")
	if err := unix.Mount("proc", w.dir+"/proc", "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(w.dir+"/proc", unix.MNT_DETACH) }()
	w.link("/proc/1/attr/exec", "/label")
	w.link("/proc/1/attr", "/attr")
	w.link(w.canary+"/secret", "/absolute")
	w.link("../canary/secret", "/sideways")
	mounts := countMounts(t)
	for _, name := range []string{"/dir", "/absolute", "/sideways", "/missing", "/label", "/attr/exec"} {
		if err := w.root.MountFile(name, []byte("x"), 0o444); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("MountFile(%q): %v, want an error that names it", name, err)
		}
	}
	if n := countMounts(t); n != mounts {
		t.Errorf("%d mounts were left", n-mounts)
	}
}

func TestReadDir(t *testing.T) {
	w := newWorld(t)
	w.write("/dir/a", "")
	w.write("/dir/b", "")
	w.link("dir", "/link")
	w.link("../canary", "/sideways")
	if names, err := w.root.ReadDir("/link", 10); len(names) != 2 || err != nil {
		t.Errorf("got %q, %v, want 2 names", names, err)
	}
	if names, _ := w.root.ReadDir("/dir", 1); len(names) != 1 {
		t.Errorf("got %q, want the limit of one", names)
	}
	for _, name := range []string{"/sideways", "/dir/a"} {
		if names, err := w.root.ReadDir(name, 10); err == nil {
			t.Errorf("ReadDir(%q) = %q, want an error", name, names)
		}
	}
}

// Kernels before 5.6 have no openat2.
func TestOpenWithoutOpenat2(t *testing.T) {
	w := newWorld(t)
	w.write("/dir/file", "content")
	w.link("../dir/file", "/dir/link")
	for name, tc := range map[string]struct {
		path  string
		flags uint64
		mode  fs.FileMode
	}{
		"a file":                {"/dir/file", unix.O_PATH, 0},
		"through a link":        {"/dir/link", unix.O_PATH, 0},
		"a link itself":         {"/dir/link", unix.O_PATH | unix.O_NOFOLLOW, fs.ModeSymlink},
		"a directory":           {"/dir", unix.O_PATH | unix.O_DIRECTORY, fs.ModeDir},
		"a directory to list":   {"/dir", unix.O_RDONLY | unix.O_DIRECTORY, fs.ModeDir},
		"the root":              {"/", unix.O_PATH | unix.O_DIRECTORY, fs.ModeDir},
		"a name below the root": {"/dir", unix.O_PATH | unix.O_NOFOLLOW, fs.ModeDir},
	} {
		f, err := w.root.openWithoutOpenat2(tc.path, tc.flags)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if info, err := f.Stat(); err != nil || info.Mode().Type() != tc.mode {
			t.Errorf("%s: %v, %v, want type %v", name, info, err, tc.mode)
		}
		_ = f.Close()
	}
	if _, err := w.root.openWithoutOpenat2("/dir/file", unix.O_PATH|unix.O_DIRECTORY); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file as a directory: %v, want ENOTDIR", err)
	}
}
