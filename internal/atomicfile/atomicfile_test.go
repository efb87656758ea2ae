package atomicfile

import (
	"bytes"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
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
		"a directory has the name":           {"dir", asWeAre, syscall.EEXIST},
		"the disk takes a part of the data":  {"spec.json", withSmallFiles, syscall.EFBIG},
		"the name is longer than a name can": {strings.Repeat("x", 256), asWeAre, syscall.ENAMETOOLONG},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := Write(filepath.Join(dir, "spec.json"), []byte("old"), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(dir, "dir", "full"), 0o755); err != nil {
				t.Fatal(err)
			}
			before, path := contents(t, dir), filepath.Join(dir, c.file)
			var err error
			c.run(t, dir, func() { err = Write(path, bytes.Repeat([]byte("new"), 5000), 0o644) })
			if !errors.Is(err, c.want) || !strings.HasPrefix(err.Error(), "write "+path+": ") {
				t.Errorf("got the error %v, want one that names the file and is %v", err, c.want)
			}
			if diff := cmp.Diff(before, contents(t, dir)); diff != "" {
				t.Errorf("files (-before +after):\n%s", diff)
			}
		})
	}
}

func asWeAre(_ *testing.T, _ string, write func()) { write() }

// asNobody writes without root's rights over files into a directory that is read-only. The file system's user belongs to
// a thread.
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
	write()
}

// withSmallFiles writes while a file cannot be larger than 4 KB.
func withSmallFiles(t *testing.T, _ string, write func()) {
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 4096, Max: old.Max}); err != nil {
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
		if err != nil && !e.IsDir() {
			t.Fatal(err)
		}
		files[e.Name()] = string(data)
	}
	return files
}

// A check leaves nothing but the directory, and fails where a write would.
func TestCheck(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	if err := Check(dir); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{}, contents(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	var err error
	asNobody(t, dir, func() { err = Check(dir) })
	if !errors.Is(err, os.ErrPermission) {
		t.Errorf("without permission: %v", err)
	}
	withSmallFiles(t, dir, func() { err = Check(dir) })
	if err != nil {
		t.Errorf("with room for small files: %v", err)
	}
	if err := Write(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Check(filepath.Join(dir, "file")); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("a file: %v", err)
	}
}
