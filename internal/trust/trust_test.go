package trust

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// me and other are unprivileged users.
const me, other = 1000, 1001

// newTree makes a safe tree of files. Tests make parts of it unsafe.
//
//	top/dir/file   top/dir/sub/   top/link -> dir/file   top/up -> ../<top>/dir   top/abs -> <top>/dir
func newTree(t *testing.T) string {
	t.Helper()
	testenv.Root(t)
	top, err := os.MkdirTemp(safeDir(t), "trust-") //nolint:usetesting // t.TempDir is under /tmp
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(top) })
	testenv.Must(t, os.Chmod(top, 0o755), os.MkdirAll(top+"/dir/sub", 0o755), os.WriteFile(top+"/dir/file", nil, 0o755),
		os.Symlink("dir/file", top+"/link"), os.Symlink("../"+filepath.Base(top)+"/dir", top+"/up"),
		os.Symlink(top+"/dir", top+"/abs"), os.Symlink("loop", top+"/loop"), os.Symlink("none", top+"/dangling"))
	return top
}

// safeDir returns a directory that only root can write to. /tmp is none.
func safeDir(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/", "/run"} {
		var st unix.Stat_t
		testenv.Must(t, unix.Stat(dir, &st))
		if st.Uid != 0 || st.Mode&0o022 != 0 {
			testenv.Skip(t, "needs "+dir+" to be root's alone")
		}
	}
	return "/run"
}

// change makes a part of the tree unsafe, or different.
type change func(top string) error

func chown(name string, uid int) change {
	return func(top string) error { return os.Lchown(filepath.Join(top, name), uid, -1) }
}

func chmod(name string, mode os.FileMode) change {
	return func(top string) error { return os.Chmod(filepath.Join(top, name), mode) }
}

func both(first, then change) change {
	return func(top string) error { return errors.Join(first(top), then(top)) }
}

func none(string) error { return nil }

func TestFile(t *testing.T) {
	for name, c := range map[string]struct {
		path   string
		change change
		want   string // of the error, with TOP for the tree; empty is none
	}{
		"root's file":              {"dir/file", none, ""},
		"through a link":           {"link", none, ""},
		"through a link upwards":   {"up/file", none, ""},
		"through an absolute link": {"abs/file", none, ""},
		"through a link of another user's": {
			"link", chown("link", other),
			"the symbolic link TOP/link is not followed, since others can change it: TOP/link belongs to user 1001",
		},
		"with dots": {"dir/../dir/./sub/../file", none, ""},
		"another user's file": {
			"dir/file", chown("dir/file", other), "others can change it: TOP/dir/file belongs to user 1001",
		},
		"a file that a group can write": {
			"dir/file", chmod("dir/file", 0o775), "others can change it: group 0 can write to TOP/dir/file",
		},
		"a file that every user can write": {
			"dir/file", chmod("dir/file", 0o702), "others can change it: every user can write to TOP/dir/file",
		},
		"in another user's directory": {
			"dir/file", chown("dir", other), "others can change it: TOP/dir belongs to user 1001",
		},
		"in a directory that a group can write": {
			"dir/file", chmod("dir", 0o770), "others can change it: group 0 can write to TOP/dir",
		},
		"a file in a sticky directory": {
			"dir/file", chmod("dir", 0o777|os.ModeSticky), "others can change it: every user can write to TOP/dir",
		},
		"below a directory in a sticky one": {"dir/file", chmod(".", 0o777|os.ModeSticky), ""},
		"below one in a group's sticky one": {"dir/file", chmod(".", 0o775|os.ModeSticky), ""},
		"through a link below a sticky one": {
			"dir/back",
			both(func(top string) error { return os.Symlink("sub/../file", top+"/dir/back") },
				chmod(".", 0o777|os.ModeSticky)),
			"",
		},
		"in another user's sticky directory": {
			"dir/file", both(chmod(".", 0o777|os.ModeSticky), chown(".", other)),
			"others can change it: TOP belongs to user 1001",
		},
		"below another's directory in a sticky": {
			"dir/file", both(chmod(".", 0o777|os.ModeSticky), chown("dir", other)),
			"others can change it: every user can write to TOP",
		},
		"below an open directory in a sticky": {
			"dir/file", both(chmod(".", 0o777|os.ModeSticky), chmod("dir", 0o777)),
			"others can change it: every user can write to TOP/dir",
		},
		"missing, in a sticky directory": {
			"none/file", chmod(".", 0o777|os.ModeSticky), "others can change it: every user can write to TOP",
		},
		"a file in a directory of a sticky": {
			"dir/none", chmod(".", 0o777|os.ModeSticky), "open TOP/dir/none: no such file or directory",
		},
		"a link in a sticky directory": {
			"link", chmod(".", 0o777|os.ModeSticky), "others can change it: every user can write to TOP",
		},
		"sticky itself, and open": {
			"dir/file", chmod("dir/file", 0o777|os.ModeSticky),
			"others can change it: every user can write to TOP/dir/file",
		},
		"far below another user's directory": {
			"dir/file", chown(".", other), "others can change it: TOP belongs to user 1001",
		},
		"of another user, through a link": {
			"link", chown("dir/file", other), "others can change it: TOP/dir/file belongs to user 1001",
		},
		"through a link in an open directory": {
			"link", chmod(".", 0o777), "others can change it: every user can write to TOP",
		},
		"below a link to an unsafe directory": {
			"abs/file", chmod("dir", 0o777), "others can change it: every user can write to TOP/dir",
		},
		"a missing file":   {"dir/none", none, "open TOP/dir/none: no such file or directory"},
		"a dangling link":  {"dangling", none, "open TOP/none: no such file or directory"},
		"a link to itself": {"loop", none, "open TOP/loop: too many levels of symbolic links"},
		"below a file":     {"dir/file/x", none, "open TOP/dir/file/x: not a directory"},
		"a directory":      {"dir", none, "TOP/dir is not a regular file"},
		"a FIFO": {
			"dir/fifo", func(top string) error { return syscall.Mkfifo(top+"/dir/fifo", 0o600) },
			"TOP/dir/fifo is not a regular file",
		},
		"missing, in an unsafe directory": {
			"dir/none", chmod("dir", 0o777), "others can change it: every user can write to TOP/dir",
		},
		"a file that every user can run": {"dir/file", chmod("dir/file", 0o755), ""},
		"with the set-user-ID bit":       {"dir/file", chmod("dir/file", 0o755|os.ModeSetuid), ""},
		"through a link to an unsafe one's ..": {
			"back", func(top string) error { return os.Symlink("dir/sub/../file", top+"/back") }, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			top := newTree(t)
			testenv.Must(t, c.change(top))
			wantError(t, top, File(filepath.Join(top, c.path)), c.want)
		})
	}
}

func wantError(t *testing.T, top string, err error, want string) {
	t.Helper()
	got := ""
	if err != nil {
		got = strings.ReplaceAll(err.Error(), top, "TOP")
	}
	if got != want {
		t.Errorf("got the error %q, want %q", got, want)
	}
	if unsafe := strings.Contains(want, "others can change it"); errors.Is(err, ErrUnsafe) != unsafe {
		t.Errorf("the error is ErrUnsafe: %v, want %v", !unsafe, unsafe)
	}
}

func TestDir(t *testing.T) {
	for name, c := range map[string]struct {
		path   string
		change change
		want   string
	}{
		"root's directory": {"dir", none, ""},
		"another user's": {
			"dir", chown("dir", other), "others can change it: TOP/dir belongs to user 1001",
		},
		"below another user's": {
			"dir/sub", chown("dir", other), "others can change it: TOP/dir belongs to user 1001",
		},
		"missing": {"dir/none/none", none, ""},
		"missing, in another user's": {
			"dir/none", chown("dir", other), "others can change it: TOP/dir belongs to user 1001",
		},
		"a file":       {"dir/file", none, "open TOP/dir/file: not a directory"},
		"below a file": {"dir/file/sub", none, "open TOP/dir/file/sub: not a directory"},
		"a link":       {"abs", none, ""},
		"a link to another user's": {
			"abs", chown("dir", other), "others can change it: TOP/dir belongs to user 1001",
		},
		"one that every user can write": {
			"dir", chmod("dir", 0o777|os.ModeSticky), "others can change it: every user can write to TOP/dir",
		},
		"in a sticky directory": {"dir", chmod(".", 0o777|os.ModeSticky), ""},
		"missing, in a sticky directory": {
			"none", chmod(".", 0o777|os.ModeSticky), "others can change it: every user can write to TOP",
		},
		"missing, in one in a sticky one":  {"dir/none", chmod(".", 0o777|os.ModeSticky), ""},
		"a link to itself":                 {"loop", none, "open TOP/loop: too many levels of symbolic links"},
		"missing, through a dangling link": {"dangling/x", none, ""},
	} {
		t.Run(name, func(t *testing.T) {
			top := newTree(t)
			testenv.Must(t, c.change(top))
			wantError(t, top, Dir(filepath.Join(top, c.path)), c.want)
		})
	}
}

// Directories may belong to any user, but links that others could have made are refused.
func TestOpenDir(t *testing.T) {
	for name, c := range map[string]struct {
		path   string
		change change
		want   string
	}{
		"root's directory":    {"dir", none, ""},
		"another user's":      {"dir", chown("dir", other), ""},
		"in another user's":   {"dir/sub", chown("dir", other), ""},
		"by a link of root's": {"abs/sub", chown("dir", other), ""},
		"by a link in another user's": {
			"abs", chown(".", other),
			"the symbolic link TOP/abs is not followed, since others can change it: TOP belongs to user 1001",
		},
		"by a link in a sticky directory": {"up/sub", chmod(".", 0o777|os.ModeSticky), ""},
		"by another user's link in one": {
			"up/sub", both(chmod(".", 0o777|os.ModeSticky), chown("up", other)),
			"the symbolic link TOP/up is not followed, since others can change it: TOP/up belongs to user 1001",
		},
		"by a link in an open directory": {
			"up/sub", chmod(".", 0o777),
			"the symbolic link TOP/up is not followed, since others can change it: every user can write to TOP",
		},
		"by a link in another's, in a sticky one": {
			"dir/back",
			both(func(top string) error { return os.Symlink("sub", top+"/dir/back") },
				both(chmod(".", 0o777|os.ModeSticky), chown("dir", other))),
			"the symbolic link TOP/dir/back is not followed, " +
				"since others can change it: TOP/dir belongs to user 1001",
		},
		"missing": {"dir/none", none, "open TOP/dir/none: no such file or directory"},
		"a file":  {"dir/file", none, "open TOP/dir/file: not a directory"},
		"a FIFO": {
			"dir/fifo", func(top string) error { return syscall.Mkfifo(top+"/dir/fifo", 0o600) },
			"open TOP/dir/fifo: not a directory",
		},
		"a link to itself":                 {"loop", none, "open TOP/loop: too many levels of symbolic links"},
		"another user's, with the file in": {"dir/sub", chmod("dir/sub", 0o777), ""},
	} {
		t.Run(name, func(t *testing.T) {
			top := newTree(t)
			testenv.Must(t, c.change(top))
			path := filepath.Join(top, c.path)
			dir, err := OpenDir(path)
			wantError(t, top, err, c.want)
			if err != nil {
				return
			}
			defer dir.Close()
			there, err := os.Stat(path)
			testenv.Must(t, err)
			opened, err := dir.Stat()
			testenv.Must(t, err, dir.Sync())
			if !os.SameFile(there, opened) || dir.Name() != path {
				t.Errorf("opened %s, which is not %s", dir.Name(), path)
			}
		})
	}
}

func TestLinksHaveTheKernelsLimit(t *testing.T) {
	top := newTree(t)
	testenv.Must(t, os.Symlink("dir/file", top+"/1"))
	for i := range maxLinks {
		testenv.Must(t, os.Symlink(fmt.Sprint(i+1), fmt.Sprint(top, "/", i+2)))
	}
	for n, want := range map[int]error{maxLinks: nil, maxLinks + 1: unix.ELOOP} {
		path := fmt.Sprint(top, "/", n)
		_, kernel := os.Stat(path)
		if err := File(path); !errors.Is(err, want) || !errors.Is(kernel, want) {
			t.Errorf("%d links: %v, and of the kernel %v; want %v", n, err, kernel, want)
		}
	}
}

func TestRelativePaths(t *testing.T) {
	top := newTree(t)
	t.Chdir(top + "/dir")
	for path, want := range map[string]string{"file": "", "./file": "", "../link": "", "": "TOP/dir"} {
		err := File(path)
		if want == "" {
			testenv.Must(t, err)
		} else if err == nil {
			t.Errorf("%q is a file", path)
		}
	}
	testenv.Must(t, os.Chmod(top, 0o777))
	if err := File("file"); !errors.Is(err, ErrUnsafe) {
		t.Errorf("below an unsafe directory: %v", err)
	}
}

func TestFilesOfTheCallerAreSafeUnlessTheyRunAsRoot(t *testing.T) {
	for name, c := range map[string]struct {
		owner int
		check func(string) error
		want  string
	}{
		"root's":                         {0, File, ""},
		"the user's own":                 {me, File, ""},
		"that of another user":           {other, File, "others can change it: TOP/dir belongs to user 1001"},
		"that of the user's group":       {-1, File, "others can change it: group 0 can write to TOP/dir"},
		"root's, to run as root":         {0, RootFile, ""},
		"the user's own, to run as root": {me, RootFile, "others can change it: TOP/dir belongs to user 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			top := newTree(t)
			if c.owner < 0 {
				testenv.Must(t, chmod("dir", 0o775)(top))
			} else {
				testenv.Must(t, chown("dir", c.owner)(top), chown("dir/file", c.owner)(top))
			}
			var err error
			runAs(t, me, func() { err = c.check(top + "/link") })
			wantError(t, top, err, c.want)
		})
	}
}

func TestUnreadableDirectoriesAreErrors(t *testing.T) {
	top := newTree(t)
	testenv.Must(t, os.Chmod(top+"/dir", 0o700))
	var file, dir error
	runAs(t, me, func() { file, dir = File(top+"/dir/file"), Dir(top+"/dir/sub") })
	if !errors.Is(file, fs.ErrPermission) || !errors.Is(dir, fs.ErrPermission) {
		t.Errorf("%v, %v", file, dir)
	}
	testenv.Must(t, os.Chmod(top+"/dir", 0o711), os.Chmod(top+"/dir/sub", 0o711))
	runAs(t, me, func() {
		if _, err := OpenDir(top + "/dir/sub"); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("a directory that cannot be read: %v", err)
		}
	})
}

// runAs runs a function as another user, on a thread of its own.
func runAs(t *testing.T, uid uintptr, do func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		var err error
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
			err = errno
		} else {
			do()
		}
		done <- err
	}()
	testenv.Must(t, <-done)
}

func TestNoHandleIsLeaked(t *testing.T) {
	top := newTree(t)
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		testenv.Must(t, err)
		return len(list)
	}
	before := open()
	for range 10 {
		for _, path := range []string{"dir/file", "dir", "link", "up/file", "abs/none", "loop", "dangling"} {
			_, _ = File(top+"/"+path), Dir(top+"/"+path)
			if dir, err := OpenDir(top + "/" + path); err == nil {
				_ = dir.Close()
			}
		}
	}
	testenv.Must(t, os.Chmod(top, 0o777))
	for range 10 {
		_, _ = File(top+"/dir/file"), Dir(top+"/dir")
		if _, err := OpenDir(top + "/abs"); err == nil {
			t.Error("an unsafe link was followed")
		}
	}
	if after := open(); after != before {
		t.Errorf("%d files are open, want %d as before", after, before)
	}
}
