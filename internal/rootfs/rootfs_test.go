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

	"gpu-cdi-plugin/internal/hooktest"
	"gpu-cdi-plugin/internal/testenv"
)

// world is a root and, beside it, a directory that nothing may touch.
type world struct {
	root           *Root
	dir, canary    string
	canaryWas      string
	makeDir, write func(name, data string)
	link           func(target, name string)
}

func newWorld(t *testing.T) *world {
	t.Helper()
	base := t.TempDir()
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
	w.canaryWas = hooktest.Hash(t, w.canary)
	var err error
	if w.root, err = Open(w.dir, "/dev"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = w.root.Close()
		if hooktest.Hash(t, w.canary) != w.canaryWas {
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

func TestReadOnlyRegularFiles(t *testing.T) {
	w := newWorld(t)
	w.makeDir("/dir", "")
	if err := unix.Mkfifo(filepath.Join(w.dir, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("fifo", filepath.Join(w.dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/dir", "/fifo", "/link"} {
		if _, err := w.root.ReadFile(name, 1000); !errors.Is(err, ErrNotRegular) {
			t.Errorf("ReadFile(%q): %v, want ErrNotRegular", name, err)
		}
	}
	w.write("/large", "")
	if err := os.Truncate(filepath.Join(w.dir, "large"), 4<<30); err != nil {
		t.Fatal(err)
	}
	if _, err := w.root.ReadFile("/large", 1000); !errors.Is(err, ErrTooLarge) {
		t.Errorf("ReadFile of 4 GiB: %v, want ErrTooLarge", err)
	}
}

func TestMagicLinksAreRefused(t *testing.T) {
	testenv.Root(t)
	hooktest.MountNamespace(t)
	w := newWorld(t)
	w.makeDir("/proc", "")
	if err := unix.Mount("proc", filepath.Join(w.dir, "proc"), "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(filepath.Join(w.dir, "proc"), unix.MNT_DETACH) }()
	w.link("/proc/self/root"+w.canary+"/secret", "/secret")
	w.link("/proc/self/root"+w.canary, "/dir")
	if data, err := w.root.ReadFile("/secret", 1000); !errors.Is(err, unix.ELOOP) {
		t.Errorf("read %q, %v through a magic link, want ELOOP", data, err)
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
		"nothing is there":                  {path: "/a/b/link", want: "a/b/link"},
		"a wrong link is there":             {setup: func(w *world) { w.link("../canary/secret", "/link") }, path: "/link", want: "link"},
		"a file is there":                   {setup: func(w *world) { w.write("/link", "file") }, path: "/link", want: "link"},
		"a directory is there":              {setup: func(w *world) { w.makeDir("/link", "") }, path: "/link"},
		"a file stands in the way":          {setup: func(w *world) { w.write("/a", "file") }, path: "/a/link"},
		"the directory is a dangling link":  {setup: func(w *world) { w.link("missing", "/a") }, path: "/a/link"},
		"the directory is a link in root":   {setup: func(w *world) { w.makeDir("/b", ""); w.link("/b", "/a") }, path: "/a/link", want: "b/link"},
		"the directory is a link to host":   {setup: func(w *world) { w.link(w.canary, "/a") }, path: "/a/link"},
		"the directory climbs to the host":  {setup: func(w *world) { w.link("../canary", "/a") }, path: "/a/link"},
		"a parent climbs to the host":       {setup: func(w *world) { w.link("../canary", "/a") }, path: "/a/dir/link"},
		"the directory climbs to the root":  {setup: func(w *world) { w.link("../../..", "/a") }, path: "/a/link", want: "link"},
		"a name as long as names can be":    {path: "/" + strings.Repeat("x", 255), want: strings.Repeat("x", 255)},
		"a chain of links without an end":   {setup: func(w *world) { w.link("b", "/a"); w.link("a", "/b") }, path: "/a/link"},
		"a device of the host's file types": {setup: func(w *world) { _ = unix.Mkfifo(filepath.Join(w.dir, "link"), 0o600) }, path: "/link", want: "link"},
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
				if !strings.Contains(err.Error(), tc.path) {
					t.Errorf("error %q does not name %s", err, tc.path)
				}
				return
			}
			if got, err := os.Readlink(filepath.Join(w.dir, tc.want)); got != "to/target" {
				t.Errorf("the link contains %q, %v", got, err)
			}
			before := hooktest.Hash(t, w.dir)
			if err := w.root.Symlink("to/target", tc.path); err != nil {
				t.Fatal(err)
			}
			if hooktest.Hash(t, w.dir) != before {
				t.Error("the second time changed something")
			}
		})
	}
}

func TestWriteFile(t *testing.T) {
	for name, tc := range map[string]struct {
		setup func(w *world)
		fails bool
	}{
		"nothing is there":          {},
		"another file is there":     {setup: func(w *world) { w.write("/etc/f", "other") }},
		"a link to the host":        {setup: func(w *world) { w.link(w.canary+"/secret", "/etc/f") }},
		"a link that climbs":        {setup: func(w *world) { w.link("../../canary/secret", "/etc/f") }},
		"a link to a file in root":  {setup: func(w *world) { w.write("/other", "kept"); w.link("/other", "/etc/f") }},
		"a FIFO":                    {setup: func(w *world) { w.makeDir("/etc", ""); _ = unix.Mkfifo(w.dir+"/etc/f", 0o600) }},
		"a directory":               {setup: func(w *world) { w.makeDir("/etc/f", "") }, fails: true},
		"its directory is a link":   {setup: func(w *world) { w.link("../canary", "/etc") }, fails: true},
		"its directory is a file":   {setup: func(w *world) { w.write("/etc", "") }, fails: true},
		"a hard link to the canary": {setup: func(w *world) { w.makeDir("/etc", ""); _ = os.Link(w.canary+"/dir/file", w.dir+"/etc/f") }},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if tc.setup != nil {
				tc.setup(w)
			}
			w.canaryWas = hooktest.Hash(t, w.canary)
			before := hooktest.Hash(t, w.dir)
			err := w.root.WriteFile("/etc/f", []byte("new"), 0o444)
			if tc.fails {
				if err == nil || !strings.Contains(err.Error(), "/etc/f") || hooktest.Hash(t, w.dir) != before {
					t.Errorf("got %v, want an error that names the file, and no change", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			checkFile(t, w.dir+"/etc/f", "new", 0o444)
			if data, err := os.ReadFile(w.dir + "/other"); err == nil && string(data) != "kept" {
				t.Errorf("wrote %q through a link", data)
			}
			before = hooktest.Hash(t, w.dir)
			if err := w.root.WriteFile("/etc/f", []byte("new"), 0o444); err != nil {
				t.Fatal(err)
			}
			if hooktest.Hash(t, w.dir) != before {
				t.Error("the second time changed something")
			}
		})
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

// While another process swaps a directory for a link out of the root, nothing may go through the link.
func TestRaceWithLinkSwap(t *testing.T) {
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
		t.Errorf("%d written, %d refused: the race was not met", written, refused)
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

func TestVolumesAreNotChanged(t *testing.T) {
	testenv.Root(t)
	hooktest.MountNamespace(t)
	w := newWorld(t)
	mountTmpfs(t, w.dir+"/volume", 0)
	mountTmpfs(t, w.dir+"/dev", 0)
	w.makeDir("/hostdev", "")
	if err := unix.Mount(w.canary, w.dir+"/volume", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(w.dir+"/volume", unix.MNT_DETACH) }()
	w.link("/volume", "/etc")
	for _, name := range []string{"/volume/secret", "/volume/new", "/etc/new", "/volume/new/sub/file", "/volume/dir/file"} {
		if err := w.root.WriteFile(name, []byte("x"), 0o644); !errors.Is(err, ErrVolume) {
			t.Errorf("WriteFile(%q): %v, want ErrVolume", name, err)
		}
		if err := w.root.Symlink("x", name); !errors.Is(err, ErrVolume) {
			t.Errorf("Symlink(%q): %v, want ErrVolume", name, err)
		}
	}
	if err := w.root.Symlink("x", "/dev/dri/by-path/y"); err != nil {
		t.Errorf("in the container's own /dev: %v", err)
	}
	if err := unix.Mount("/dev", w.dir+"/dev", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(w.dir+"/dev", unix.MNT_DETACH) }()
	if err := w.root.Symlink("x", "/dev/gpu-test-link"); !errors.Is(err, ErrVolume) {
		t.Errorf("in the host's /dev: %v, want ErrVolume", err)
	}
}

func TestMountFile(t *testing.T) {
	testenv.Root(t)
	for name, old := range map[string]bool{"detached": false, "as before Linux 6.15": true} {
		t.Run(name, func(t *testing.T) {
			hooktest.MountNamespace(t)
			w := newWorld(t)
			w.write("/etc/f", "of the image")
			w.link("etc/f", "/link")
			mounts := countMounts(t)
			if old {
				mountTheOldWay(t, w.root, "/link", "new")
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

// Where SELinux is on, a container may not read a file with the label of any tmpfs.
func TestMountFileKeepsLabel(t *testing.T) {
	testenv.Root(t)
	hooktest.MountNamespace(t)
	w := newWorld(t)
	mountTmpfs(t, w.dir, 0) // which has attributes, whatever the temporary directory is on
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

// A volume with mount propagation is the host's too: what the image makes the hook mount there, the host would see.
func TestMountFileDoesNotPropagate(t *testing.T) {
	testenv.Root(t)
	hooktest.MountNamespace(t)
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
		if err := w.root.MountFile(name, []byte("new"), 0o444); !errors.Is(err, ErrShared) || !strings.Contains(err.Error(), name) {
			t.Errorf("MountFile(%q): %v, want ErrShared with the name", name, err)
		}
	}
	if n := countMounts(t); n != mounts {
		t.Errorf("%d mounts were left", n-mounts)
	}
	checkFile(t, host+"/ld.so.cache", "of the host", 0o644)
	// A slave receives mounts, but passes none on.
	if err := unix.Mount("", w.dir+"/volume", "", unix.MS_SLAVE, ""); err != nil {
		t.Fatal(err)
	}
	if err := w.root.MountFile("/etc/ld.so.cache", []byte("new"), 0o444); err != nil {
		t.Error(err)
	}
	checkFile(t, w.dir+"/volume/ld.so.cache", "new", 0o444)
	checkFile(t, host+"/ld.so.cache", "of the host", 0o644)
}

func mountTheOldWay(t *testing.T, r *Root, name, data string) {
	t.Helper()
	tmpfs, err := newTmpfs(len(data))
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
	if err := attach(file, target); err != nil {
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
	hooktest.MountNamespace(t)
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
func TestWithoutOpenat2(t *testing.T) {
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
		f, err := w.root.openSlowly(tc.path, tc.flags)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if i, err := info(f); err != nil || i.Mode.Type() != tc.mode {
			t.Errorf("%s: %v, %v, want type %v", name, i.Mode, err, tc.mode)
		}
		_ = f.Close()
	}
	if _, err := w.root.openSlowly("/dir/file", unix.O_PATH|unix.O_DIRECTORY); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file as a directory: %v, want ENOTDIR", err)
	}
}
