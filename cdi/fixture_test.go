package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"golang.org/x/sys/unix"
)

const testVersion = "580.126.09"

// tree is a directory that a test fills.
type tree struct {
	t   testing.TB
	dir string
}

func newTree(t testing.TB) *tree { return &tree{t, t.TempDir()} }

// path makes the directory that a file is to be in, and returns the file's path.
func (r *tree) path(p string) string {
	r.t.Helper()
	full := filepath.Join(r.dir, p)
	testenv.Must(r.t, os.MkdirAll(filepath.Dir(full), 0o755))
	return full
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

func (r *tree) fifo(p string) {
	r.t.Helper()
	testenv.Must(r.t, unix.Mkfifo(r.path(p), 0o644))
}

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
