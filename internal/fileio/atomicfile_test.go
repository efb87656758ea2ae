package fileio

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
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestWriteHasItsModeWhateverTheUmask(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "spec.json")
	for _, mode := range []os.FileMode{0o644, 0o600, 0o666} {
		testenv.Must(t, Replace(path, []byte("{}"), mode))
		info, err := os.Stat(path)
		testenv.Must(t, err)
		if info.Mode() != mode {
			t.Errorf("the file has mode %v, want %v", info.Mode(), mode)
		}
	}
}

func TestWriteReplacesALinkAndNotItsTarget(t *testing.T) {
	dir := t.TempDir()
	link, target := filepath.Join(dir, "link"), filepath.Join(dir, "target")
	testenv.Must(t, os.WriteFile(target, []byte("old"), 0o600))
	testenv.Must(t, os.Symlink("target", link))
	testenv.Must(t, Replace(link, []byte("new"), 0o644))
	want := map[string]string{"link": "new", "target": "old"}
	if diff := cmp.Diff(want, readFiles(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// After an error the directory is unchanged, without a temporary file.
func TestWriteLeavesNothingOnAnError(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		run  func(t *testing.T, dir string, write func())
		want error
	}{
		"the directory is missing":      {"none/spec.json", directly, os.ErrNotExist},
		"the directory is a file":       {"spec.json/spec.json", directly, syscall.ENOTDIR},
		"no permission to write":        {"spec.json", asUnprivilegedUser, os.ErrPermission},
		"a directory has the name":      {"dir", directly, syscall.EISDIR},
		"the disk is full after a part": {"spec.json", withSmallFiles, syscall.EFBIG},
		"the name is too long":          {strings.Repeat("x", 256), directly, syscall.ENAMETOOLONG},
		"the mode cannot be set":        {"spec.json", without(unix.SYS_FCHMOD), syscall.EIO},
		"the data cannot be synced":     {"spec.json", without(unix.SYS_FSYNC), syscall.EIO},
		"the file cannot be renamed": {
			"spec.json", without(unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2), syscall.EIO,
		},
		"a link that others could have made": {"link/spec.json", inWritableDir, trust.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			dir := makeTestDir(t)
			before, path := readFiles(t, dir), filepath.Join(dir, c.file)
			var err error
			c.run(t, dir, func() { err = Replace(path, bytes.Repeat([]byte("new"), smallFile), 0o644) })
			if !errors.Is(err, c.want) || !strings.HasPrefix(fmt.Sprint(err), "write "+path+": ") {
				t.Errorf("got the error %v, want one that names the file and is %v", err, c.want)
			}
			if diff := cmp.Diff(before, readFiles(t, dir)); diff != "" {
				t.Errorf("files (-before +after):\n%s", diff)
			}
		})
	}
}

// makeTestDir makes a directory with a file, a directory and a link to that, which every user can reach.
func makeTestDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755),
		os.MkdirAll(filepath.Join(dir, "dir", "full"), 0o755), os.Symlink("dir", filepath.Join(dir, "link")),
		Replace(filepath.Join(dir, "spec.json"), []byte("old"), 0o644))
	testenv.Must(t, err)
	return dir
}

func directly(_ *testing.T, _ string, write func()) { write() }

func inWritableDir(t *testing.T, dir string, write func()) {
	testenv.Must(t, os.Chmod(dir, 0o777))
	write()
}

// asUnprivilegedUser writes to a read-only directory without root's rights to files, which a single thread can drop.
func asUnprivilegedUser(t *testing.T, dir string, write func()) {
	testenv.Must(t, os.Chmod(dir, 0o555))
	defer func() { _ = os.Chmod(dir, 0o755) }()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if os.Geteuid() == 0 {
		old, _ := unix.SetfsuidRetUid(65534)
		defer func() { _ = unix.Setfsuid(old) }()
	}
	// The user can read the directory, so only the write fails.
	if _, err := os.ReadDir(dir); err != nil {
		t.Fatal(err)
	}
	write()
}

// without writes on a thread whose system calls of those numbers fail with EIO.
func without(calls ...uintptr) func(*testing.T, string, func()) {
	return func(t *testing.T, _ string, write func()) {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked, since a filter cannot be removed
			err := refuse(calls)
			if err == nil {
				write()
			}
			done <- err
		}()
		testenv.Must(t, <-done)
	}
}

// refuse makes system calls fail on this thread, by a filter of seccomp(2).
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

// smallFile is in bytes. The limit applies to the whole process, so the log of the testing package must fit too.
const smallFile = 1 << 20

// withSmallFiles writes while files cannot be larger than smallFile.
func withSmallFiles(t *testing.T, _ string, write func()) {
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var old unix.Rlimit
	testenv.Must(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &old))
	testenv.Must(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: smallFile, Max: old.Max}))
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
			t.Error(err)
		}
	}()
	write()
}

func TestReadersSeeTheOldOrTheNewFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "spec.json")
	versions := [][]byte{bytes.Repeat([]byte("a"), 1<<16), bytes.Repeat([]byte("b"), 1<<17)}
	testenv.Must(t, Replace(path, versions[0], 0o644))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 60 {
			if err := Replace(path, versions[i%2], 0o644); err != nil {
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
		testenv.Must(t, err)
		if !bytes.Equal(got, versions[0]) && !bytes.Equal(got, versions[1]) {
			t.Fatalf("read %d bytes that are neither version", len(got))
		}
	}
}

// The new file has the old one's mode and owner, or the old one stays.
func TestWriteLike(t *testing.T) {
	for name, c := range map[string]struct {
		run  func(t *testing.T, dir string, write func())
		want error
	}{
		"with all rights":            {directly, nil},
		"the owner cannot be set":    {without(unix.SYS_FCHOWN), syscall.EIO},
		"the mode cannot be set":     {without(unix.SYS_FCHMOD), syscall.EIO},
		"the data cannot be synced":  {without(unix.SYS_FSYNC), syscall.EIO},
		"the file cannot be renamed": {without(unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2), syscall.EIO},
		"the directory is read-only": {asUnprivilegedUser, os.ErrPermission},
		"no file can be created":     {without(unix.SYS_OPENAT), syscall.EIO},
	} {
		t.Run(name, func(t *testing.T) {
			path := makeTestDir(t)
			file := filepath.Join(path, "spec.json")
			uid, gid := os.Getuid(), os.Getgid()
			if uid == 0 {
				uid, gid = 1000, 100
			}
			testenv.Must(t, errors.Join(os.Chown(file, uid, gid), os.Chmod(file, 0o640)))
			before, mode, want := readFiles(t, path), os.FileMode(0o640), "old"
			info, err := os.Stat(file)
			testenv.Must(t, err)
			dir, err := os.Open(path)
			testenv.Must(t, err)
			defer dir.Close()
			c.run(t, path, func() { err = ReplaceLike(dir, "spec.json", []byte("new"), info) })
			if !errors.Is(err, c.want) {
				t.Errorf("got the error %v, want %v", err, c.want)
			}
			if c.want == nil {
				want = "new"
			}
			before["spec.json"] = want
			if diff := cmp.Diff(before, readFiles(t, path)); diff != "" {
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

func TestWriteLikeWritesToTheOpenDirectoryIfItIsReplaced(t *testing.T) {
	path := makeTestDir(t)
	dir, err := os.Open(path)
	testenv.Must(t, err)
	defer dir.Close()
	info, err := os.Stat(filepath.Join(path, "spec.json"))
	testenv.Must(t, err)
	testenv.Must(t, errors.Join(os.Rename(path, path+".old"), os.Mkdir(path, 0o755)))
	testenv.Must(t, ReplaceLike(dir, "spec.json", []byte("new"), info))
	if got := readFiles(t, path+".old")["spec.json"]; got != "new" {
		t.Errorf("the directory that was opened has %q", got)
	}
	if diff := cmp.Diff(map[string]string{}, readFiles(t, path)); diff != "" {
		t.Errorf("the directory that replaced it (-want +got):\n%s", diff)
	}
}

func TestWriteRemovesStaleTemporaryFiles(t *testing.T) {
	dir := makeTestDir(t)
	want := readFiles(t, dir)
	for name, age := range map[string]time.Duration{
		".spec.json.a.tmp": staleAge + time.Minute, ".spec.json.b.tmp": staleAge - time.Minute,
		".spec.json.c": 2 * staleAge, "spec.json.d.tmp": 2 * staleAge, ".other.json.e.tmp": 2 * staleAge,
	} {
		path, then := filepath.Join(dir, name), time.Now().Add(-age)
		testenv.Must(t, errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, then, then)))
		want[name] = ""
	}
	testenv.Must(t, os.Symlink("dir", filepath.Join(dir, ".spec.json.f.tmp")))
	then := unix.NsecToTimeval(time.Now().Add(-2 * staleAge).UnixNano())
	testenv.Must(t, unix.Lutimes(filepath.Join(dir, ".spec.json.f.tmp"), []unix.Timeval{then, then}))
	delete(want, ".spec.json.a.tmp")
	want[".spec.json.f.tmp"], want["spec.json"] = "", "new"
	testenv.Must(t, Replace(filepath.Join(dir, "spec.json"), []byte("new"), 0o644))
	if diff := cmp.Diff(want, readFiles(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestRemove(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		run  func(t *testing.T, dir string, remove func())
		want error
	}{
		"a file":                             {"spec.json", directly, nil},
		"a link":                             {"link", directly, nil},
		"a missing file":                     {"none", directly, os.ErrNotExist},
		"a directory":                        {"dir", directly, syscall.EISDIR},
		"in a missing directory":             {"none/none", directly, os.ErrNotExist},
		"without permission":                 {"spec.json", asUnprivilegedUser, os.ErrPermission},
		"a link that others could have made": {"link/full", inWritableDir, trust.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			dir := makeTestDir(t)
			want := readFiles(t, dir)
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
			if diff := cmp.Diff(want, readFiles(t, dir)); diff != "" {
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
		"a new one":                          {"new", 0o755, directly, nil},
		"an existing one":                    {"private", 0o700, directly, nil},
		"in a missing directory":             {"none/new", 0, directly, os.ErrNotExist},
		"without permission":                 {"new", 0, asUnprivilegedUser, os.ErrPermission},
		"its mode cannot be set":             {"new", 0o700, without(unix.SYS_FCHMOD), syscall.EIO},
		"a link that others could have made": {"link/new", 0, inWritableDir, trust.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			dir := makeTestDir(t)
			testenv.Must(t, os.Mkdir(filepath.Join(dir, "private"), 0o700))
			var err error
			c.run(t, dir, func() { err = MakeDir(filepath.Join(dir, c.dir)) })
			if !errors.Is(err, c.want) {
				t.Errorf("got the error %v, want %v", err, c.want)
			}
			info, err := os.Stat(filepath.Join(dir, c.dir))
			if c.mode == 0 {
				if !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the directory exists: %v", err)
				}
				return
			}
			testenv.Must(t, err)
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
		"a new one":                          {"new", directly, nil},
		"with new parents":                   {"new/new/new", directly, nil},
		"an existing one":                    {"dir", directly, nil},
		"below a file":                       {"spec.json/new", directly, syscall.ENOTDIR},
		"below a dangling link":              {"dangling/new", directly, os.ErrNotExist},
		"without permission":                 {"new/new", asUnprivilegedUser, os.ErrPermission},
		"a link that others could have made": {"link/new/new", inWritableDir, trust.ErrUnsafe},
		"the mode of one cannot be set":      {"new/new", without(unix.SYS_FCHMOD), syscall.EIO},
		"the parent cannot be made":          {"new/new", without(unix.SYS_MKDIRAT), syscall.EIO},
		"the new one cannot be opened":       {"new", without(unix.SYS_OPENAT), syscall.EIO},
		"in a directory that is a link":      {"link/new", directly, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := makeTestDir(t)
			testenv.Must(t, os.Symlink("none", filepath.Join(dir, "dangling")))
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
	dir := makeTestDir(t)
	private, path, link := filepath.Join(dir, "private"), filepath.Join(dir, "new"), filepath.Join(dir, "other")
	testenv.Must(t, os.Mkdir(private, 0o700))
	refused := false
	for end := time.Now().Add(time.Minute); !refused; {
		if time.Now().After(end) {
			t.Fatal("the link was never in the directory's place in time")
		}
		testenv.Must(t, os.Symlink("private", link))
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
		testenv.Must(t, errors.Join(<-swapped, os.Remove(path), os.Remove(link)))
		if info, err := os.Stat(private); err != nil || info.Mode() != os.ModeDir|0o700 {
			t.Fatalf("the mode of the link's target has changed: %v, %v", info, err)
		}
	}
}

func TestNoHandleIsLeaked(t *testing.T) {
	dir := makeTestDir(t)
	path := func(name string) string { return filepath.Join(dir, name) }
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		testenv.Must(t, err)
		return len(list)
	}
	before := open()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it would close leaked files
	for range 10 {
		_ = errors.Join(Replace(path("spec.json"), nil, 0o644), Replace(path("dir"), nil, 0o644),
			Replace(path("none/x"), nil, 0o644), CheckWritable(path("dir")), CheckWritable(path("spec.json")),
			MakeDir(path("new")), os.Remove(path("new")), MakeDir(path("dir")), MakeDir(path("none/x")),
			MakeDirs(path("spec.json/x")), Remove(path("none")), Replace(path("gone"), nil, 0o644), Remove(path("gone")))
	}
	if after := open(); after != before {
		t.Errorf("%d files are open, want %d as before", after, before)
	}
}

// readFiles returns the contents of a directory's files by name. Files that are not regular are empty.
func readFiles(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	testenv.Must(t, err)
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

// CheckWritable leaves nothing but the directory, and fails if Replace would.
func TestCheck(t *testing.T) {
	parent := makeTestDir(t)
	for name, c := range map[string]struct {
		dir  string
		run  func(t *testing.T, dir string, check func())
		want error
	}{
		"a missing directory":                 {"a/b", directly, nil},
		"an existing one":                     {"dir", directly, nil},
		"with room for small files":           {"dir", withSmallFiles, nil},
		"with room for no file":               {"dir", without(unix.SYS_WRITE), syscall.EIO},
		"without permission":                  {".", asUnprivilegedUser, os.ErrPermission},
		"without permission to make it":       {"c", asUnprivilegedUser, os.ErrPermission},
		"a file":                              {"spec.json", directly, syscall.ENOTDIR},
		"a link that others could have made":  {"link", inWritableDir, trust.ErrUnsafe},
		"a file that cannot be removed again": {"full", without(unix.SYS_UNLINKAT), syscall.EIO},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(parent, c.dir)
			var err error
			c.run(t, parent, func() { err = CheckWritable(dir) })
			if !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), dir+": ") {
				t.Errorf("got the error %v, want one that names the directory and is %v", err, c.want)
			}
			if c.want != nil {
				return
			}
			if diff := cmp.Diff(map[string]string{}, files(readFiles(t, dir))); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

// files removes a directory of the tests.
func files(all map[string]string) map[string]string {
	delete(all, "full")
	return all
}
