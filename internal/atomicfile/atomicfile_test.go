package atomicfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/trust"
)

func TestWriteHasItsModeWhateverTheUmask(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "spec.json")
	for _, mode := range []os.FileMode{0o644, 0o600, 0o666} {
		if err := Write(path, []byte("{}"), mode); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != mode {
			t.Errorf("the file has mode %v, want %v", info.Mode(), mode)
		}
	}
}

func TestWriteReplacesALinkAndNotWhatItLeadsTo(t *testing.T) {
	dir := t.TempDir()
	link, target := filepath.Join(dir, "link"), filepath.Join(dir, "target")
	if err := os.WriteFile(target, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("target", link); err != nil {
		t.Fatal(err)
	}
	if err := Write(link, []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"link": "new", "target": "old"}
	if diff := cmp.Diff(want, contents(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// After an error everything is as it was, and there is no temporary file.
func TestWriteFailsWithoutATrace(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		run  func(t *testing.T, dir string, write func())
		want error
	}{
		"the directory is not there":         {"none/spec.json", asWeAre, os.ErrNotExist},
		"the directory is a file":            {"spec.json/spec.json", asWeAre, syscall.ENOTDIR},
		"the directory may not be written":   {"spec.json", asNobody, os.ErrPermission},
		"a directory has the name":           {"dir", asWeAre, syscall.EISDIR},
		"the disk takes a part of the data":  {"spec.json", withSmallFiles, syscall.EFBIG},
		"the name is longer than a name can": {strings.Repeat("x", 256), asWeAre, syscall.ENAMETOOLONG},
		"the mode cannot be set":             {"spec.json", without(unix.SYS_FCHMOD), syscall.EIO},
		"the disk does not take the data":    {"spec.json", without(unix.SYS_FSYNC), syscall.EIO},
		"the file cannot be renamed": {
			"spec.json", without(unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2), syscall.EIO,
		},
		"others could have made a link": {"link/spec.json", inOpenDir, trust.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			dir := someDir(t)
			before, path := contents(t, dir), filepath.Join(dir, c.file)
			var err error
			c.run(t, dir, func() { err = Write(path, bytes.Repeat([]byte("new"), smallFile), 0o644) })
			if !errors.Is(err, c.want) || !strings.HasPrefix(fmt.Sprint(err), "write "+path+": ") {
				t.Errorf("got the error %v, want one that names the file and is %v", err, c.want)
			}
			if diff := cmp.Diff(before, contents(t, dir)); diff != "" {
				t.Errorf("files (-before +after):\n%s", diff)
			}
		})
	}
}

// someDir is a directory with a file, a directory and a link to that, which everybody can get to.
func someDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755),
		os.MkdirAll(filepath.Join(dir, "dir", "full"), 0o755), os.Symlink("dir", filepath.Join(dir, "link")),
		Write(filepath.Join(dir, "spec.json"), []byte("old"), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func asWeAre(_ *testing.T, _ string, write func()) { write() }

func inOpenDir(t *testing.T, dir string, write func()) {
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	write()
}

// asNobody writes without root's rights over files into a directory that is read-only. The file system's user belongs
// to a thread.
func asNobody(t *testing.T, dir string, write func()) {
	if err := os.Chmod(dir, 0o555); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.Chmod(dir, 0o755) }()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if os.Geteuid() == 0 {
		old, _ := unix.SetfsuidRetUid(65534)
		defer func() { _ = unix.Setfsuid(old) }()
	}
	// What is refused below is the write, and not the way to the directory.
	if _, err := os.ReadDir(dir); err != nil {
		t.Fatal(err)
	}
	write()
}

// without writes on a thread whose calls of the kernel with those numbers fail with EIO. The thread ends with that.
func without(calls ...uintptr) func(*testing.T, string, func()) {
	return func(t *testing.T, _ string, write func()) {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // for ever: a filter cannot be taken off
			err := refuse(calls)
			if err == nil {
				write()
			}
			done <- err
		}()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

// refuse makes calls of the kernel fail on this thread, by a filter of seccomp(2).
func refuse(calls []uintptr) error {
	statement := func(code uint16, jump uint8, k uint32) unix.SockFilter {
		return unix.SockFilter{Code: code, Jf: jump, K: k}
	}
	filter := []unix.SockFilter{statement(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, 0, 0)} // seccomp_data.nr
	for _, nr := range calls {
		filter = append(filter, statement(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, 1, uint32(nr)),
			statement(unix.BPF_RET|unix.BPF_K, 0, unix.SECCOMP_RET_ERRNO|uint32(unix.EIO)))
	}
	filter = append(filter, statement(unix.BPF_RET|unix.BPF_K, 0, unix.SECCOMP_RET_ALLOW))
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	return nil
}

// smallFile is in bytes. The limit is the whole process's, and the log that the testing package writes must fit in.
const smallFile = 1 << 20

// withSmallFiles writes while no file can be larger than that.
func withSmallFiles(t *testing.T, _ string, write func()) {
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: smallFile, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
			t.Error(err)
		}
	}()
	write()
}

func TestReadersSeeOldOrNewAndNothingBetween(t *testing.T) {
	path := filepath.Join(t.TempDir(), "spec.json")
	versions := [][]byte{bytes.Repeat([]byte("a"), 1<<16), bytes.Repeat([]byte("b"), 1<<17)}
	if err := Write(path, versions[0], 0o644); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 60 {
			if err := Write(path, versions[i%2], 0o644); err != nil {
				t.Error(err)
			}
		}
	}()
	for reading := true; reading; {
		select {
		case <-done:
			reading = false
		default:
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, versions[0]) && !bytes.Equal(got, versions[1]) {
			t.Fatalf("read %d bytes that are neither version", len(got))
		}
	}
}

// The file that replaces one has its mode and owner, or does not replace it.
func TestWriteLike(t *testing.T) {
	for name, c := range map[string]struct {
		run  func(t *testing.T, dir string, write func())
		want error
	}{
		"with all rights":             {asWeAre, nil},
		"the owner cannot be set":     {without(unix.SYS_FCHOWN), syscall.EIO},
		"the mode cannot be set":      {without(unix.SYS_FCHMOD), syscall.EIO},
		"the disk takes no data":      {without(unix.SYS_FSYNC), syscall.EIO},
		"the file cannot be renamed":  {without(unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2), syscall.EIO},
		"the directory is read-only":  {asNobody, os.ErrPermission},
		"no file may have a new name": {without(unix.SYS_OPENAT), syscall.EIO},
	} {
		t.Run(name, func(t *testing.T) {
			path := someDir(t)
			file := filepath.Join(path, "spec.json")
			uid, gid := os.Getuid(), os.Getgid()
			if uid == 0 {
				uid, gid = 1000, 100
			}
			if err := errors.Join(os.Chown(file, uid, gid), os.Chmod(file, 0o640)); err != nil {
				t.Fatal(err)
			}
			before, mode, want := contents(t, path), os.FileMode(0o640), "old"
			info, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			dir, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer dir.Close()
			c.run(t, path, func() { err = WriteLike(dir, "spec.json", []byte("new"), info) })
			if !errors.Is(err, c.want) {
				t.Errorf("got the error %v, want %v", err, c.want)
			}
			if c.want == nil {
				want = "new"
			}
			before["spec.json"] = want
			if diff := cmp.Diff(before, contents(t, path)); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
			if info, err = os.Stat(file); err != nil {
				t.Fatal(err)
			}
			if st := info.Sys().(*syscall.Stat_t); info.Mode() != mode || int(st.Uid) != uid || int(st.Gid) != gid {
				t.Errorf("%v of %d:%d, want %v of %d:%d", info.Mode(), st.Uid, st.Gid, mode, uid, gid)
			}
		})
	}
}

// What happens on a handle happens in its directory, whatever takes its place.
func TestWriteLikeWritesWhereTheHandleIs(t *testing.T) {
	path := someDir(t)
	dir, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	info, err := os.Stat(filepath.Join(path, "spec.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Rename(path, path+".old"), os.Mkdir(path, 0o755)); err != nil {
		t.Fatal(err)
	}
	if err := WriteLike(dir, "spec.json", []byte("new"), info); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, path+".old")["spec.json"]; got != "new" {
		t.Errorf("the directory that was opened has %q", got)
	}
	if diff := cmp.Diff(map[string]string{}, contents(t, path)); diff != "" {
		t.Errorf("the one in its place (-want +got):\n%s", diff)
	}
}

func TestStaleTemporaryFilesGo(t *testing.T) {
	dir := someDir(t)
	want := contents(t, dir)
	for name, age := range map[string]time.Duration{
		".spec.json.a.tmp": staleAge + time.Minute, ".spec.json.b.tmp": staleAge - time.Minute, ".spec.json.c": 2 * staleAge,
		"spec.json.d.tmp": 2 * staleAge, ".other.json.e.tmp": 2 * staleAge,
	} {
		path, then := filepath.Join(dir, name), time.Now().Add(-age)
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, then, then)); err != nil {
			t.Fatal(err)
		}
		want[name] = ""
	}
	if err := os.Symlink("dir", filepath.Join(dir, ".spec.json.f.tmp")); err != nil {
		t.Fatal(err)
	}
	then := unix.NsecToTimeval(time.Now().Add(-2 * staleAge).UnixNano())
	if err := unix.Lutimes(filepath.Join(dir, ".spec.json.f.tmp"), []unix.Timeval{then, then}); err != nil {
		t.Fatal(err)
	}
	delete(want, ".spec.json.a.tmp")
	want[".spec.json.f.tmp"], want["spec.json"] = "", "new"
	if err := Write(filepath.Join(dir, "spec.json"), []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, contents(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestRemove(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		run  func(t *testing.T, dir string, remove func())
		want error
	}{
		"a file":                        {"spec.json", asWeAre, nil},
		"a link":                        {"link", asWeAre, nil},
		"a file that is not there":      {"none", asWeAre, os.ErrNotExist},
		"a directory":                   {"dir", asWeAre, syscall.EISDIR},
		"a directory that is not there": {"none/none", asWeAre, os.ErrNotExist},
		"without permission":            {"spec.json", asNobody, os.ErrPermission},
		"others could have made a link": {"link/full", inOpenDir, trust.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			dir := someDir(t)
			want := contents(t, dir)
			var err error
			c.run(t, dir, func() { err = Remove(filepath.Join(dir, c.file)) })
			if !errors.Is(err, c.want) {
				t.Errorf("got the error %v, want %v", err, c.want)
			}
			if c.want == nil {
				delete(want, c.file)
			} else if !strings.HasPrefix(fmt.Sprint(err), "remove "+filepath.Join(dir, c.file)+": ") {
				t.Errorf("the error does not name the file: %v", err)
			}
			if diff := cmp.Diff(want, contents(t, dir)); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMakeDir(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	for name, c := range map[string]struct {
		dir  string
		mode os.FileMode // of the directory afterwards
		run  func(t *testing.T, dir string, mk func())
		want error
	}{
		"a new one":                      {"new", 0o755, asWeAre, nil},
		"one that is there":              {"private", 0o700, asWeAre, nil},
		"one in a directory that is not": {"none/new", 0, asWeAre, os.ErrNotExist},
		"without permission":             {"new", 0, asNobody, os.ErrPermission},
		"its mode cannot be set":         {"new", 0o700, without(unix.SYS_FCHMOD), syscall.EIO},
		"others could have made a link":  {"link/new", 0, inOpenDir, trust.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			dir := someDir(t)
			if err := os.Mkdir(filepath.Join(dir, "private"), 0o700); err != nil {
				t.Fatal(err)
			}
			var err error
			c.run(t, dir, func() { err = MakeDir(filepath.Join(dir, c.dir)) })
			if !errors.Is(err, c.want) {
				t.Errorf("got the error %v, want %v", err, c.want)
			}
			info, err := os.Stat(filepath.Join(dir, c.dir))
			if c.mode == 0 {
				if !errors.Is(err, os.ErrNotExist) {
					t.Errorf("it is there: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode() != os.ModeDir|c.mode {
				t.Errorf("mode %v, want %v", info.Mode(), c.mode)
			}
		})
	}
}

func TestMakeDirs(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	for name, c := range map[string]struct {
		path string
		run  func(t *testing.T, dir string, makeDirs func())
		want error
	}{
		"a new one":                     {"new", asWeAre, nil},
		"with new parents":              {"new/new/new", asWeAre, nil},
		"an existing one":               {"dir", asWeAre, nil},
		"below a file":                  {"spec.json/new", asWeAre, syscall.ENOTDIR},
		"below a dangling link":         {"dangling/new", asWeAre, os.ErrNotExist},
		"without permission":            {"new/new", asNobody, os.ErrPermission},
		"others could have made a link": {"link/new/new", inOpenDir, trust.ErrUnsafe},
		"the mode of one cannot be set": {"new/new", without(unix.SYS_FCHMOD), syscall.EIO},
		"the parent cannot be made":     {"new/new", without(unix.SYS_MKDIRAT), syscall.EIO},
		"the new one cannot be opened":  {"new", without(unix.SYS_OPENAT), syscall.EIO},
		"in a directory that is a link": {"link/new", asWeAre, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := someDir(t)
			if err := os.Symlink("none", filepath.Join(dir, "dangling")); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, c.path)
			var err error
			c.run(t, dir, func() { err = MakeDirs(path) })
			if !errors.Is(err, c.want) || err != nil && !strings.HasPrefix(err.Error(), "mkdir "+dir) {
				t.Errorf("got the error %v, want one that names the directory and is %v", err, c.want)
			}
			if c.want != nil || c.path == "dir" {
				return
			}
			for ; path != dir && filepath.Base(path) != "link"; path = filepath.Dir(path) {
				if info, err := os.Stat(path); err != nil || info.Mode() != os.ModeDir|0o755 {
					t.Errorf("%s: %v, %v, want a directory that every user can read", path, info, err)
				}
			}
		})
	}
}

// The owner of the parent can put a link in the place of the new directory before its mode is set. The link's target
// must not become readable for every user.
func TestMakeDirFollowsNoLinkInItsPlace(t *testing.T) {
	dir := someDir(t)
	private, path, link := filepath.Join(dir, "private"), filepath.Join(dir, "new"), filepath.Join(dir, "other")
	if err := os.Mkdir(private, 0o700); err != nil {
		t.Fatal(err)
	}
	refused := false
	for end := time.Now().Add(time.Minute); !refused; {
		if time.Now().After(end) {
			t.Fatal("the link was never in the directory's place in time")
		}
		if err := os.Symlink("private", link); err != nil {
			t.Fatal(err)
		}
		swapped := make(chan error)
		go func() {
			for {
				// Fails until the directory is there.
				err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE)
				if !errors.Is(err, unix.ENOENT) {
					swapped <- err
					return
				}
			}
		}()
		refused = MakeDir(path) != nil
		if err := errors.Join(<-swapped, os.Remove(path), os.Remove(link)); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(private); err != nil || info.Mode() != os.ModeDir|0o700 {
			t.Fatalf("the mode of the link's target has changed: %v, %v", info, err)
		}
	}
}

// Whatever the result, nothing stays open.
func TestNothingStaysOpen(t *testing.T) {
	dir := someDir(t)
	path := func(name string) string { return filepath.Join(dir, name) }
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	before := open()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // which would close what was forgotten
	for range 10 {
		_ = errors.Join(Write(path("spec.json"), nil, 0o644), Write(path("dir"), nil, 0o644), Write(path("none/x"), nil, 0o644),
			Check(path("dir")), Check(path("spec.json")), MakeDir(path("new")), os.Remove(path("new")), MakeDir(path("dir")),
			MakeDir(path("none/x")), MakeDirs(path("spec.json/x")), Remove(path("none")), Write(path("gone"), nil, 0o644), Remove(path("gone")))
	}
	if after := open(); after != before {
		t.Errorf("%d files are open, before it were %d", after, before)
	}
}

// contents are the files in dir by name; what is not a regular file or a link has no content.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil && e.Type().IsRegular() {
			t.Fatal(err)
		}
		files[e.Name()] = string(data)
	}
	return files
}

// A check leaves nothing but the directory, and fails where a write would.
func TestCheck(t *testing.T) {
	parent := someDir(t)
	for name, c := range map[string]struct {
		dir  string
		run  func(t *testing.T, dir string, check func())
		want error
	}{
		"a directory that is not there":       {"a/b", asWeAre, nil},
		"one that is":                         {"dir", asWeAre, nil},
		"with room for small files":           {"dir", withSmallFiles, nil},
		"with room for no file":               {"dir", without(unix.SYS_WRITE), syscall.EIO},
		"without permission":                  {".", asNobody, os.ErrPermission},
		"without permission to make it":       {"c", asNobody, os.ErrPermission},
		"a file":                              {"spec.json", asWeAre, syscall.ENOTDIR},
		"a link that others could have made":  {"link", inOpenDir, trust.ErrUnsafe},
		"a file that cannot be removed again": {"full", without(unix.SYS_UNLINKAT), syscall.EIO},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(parent, c.dir)
			var err error
			c.run(t, parent, func() { err = Check(dir) })
			if !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), dir+": ") {
				t.Errorf("got the error %v, want one that names the directory and is %v", err, c.want)
			}
			if c.want != nil {
				return
			}
			if diff := cmp.Diff(map[string]string{}, files(contents(t, dir))); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

// files is contents without directories of tests.
func files(all map[string]string) map[string]string {
	delete(all, "full")
	return all
}
