// Package testenv says what a test needs from the machine it runs on.
//
// A test that cannot run is skipped with a reason, one line. With CI=true in the environment it fails instead: where
// everything is installed, nothing may be skipped.
package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Skip ends the test: skipped with the reason, or failed with CI=true.
func Skip(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("cannot run, and CI=true: %s", reason)
	}
	t.Skip(reason)
}

// Root returns only if the process is root and can make device nodes.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs root")
	}
	if err := unix.Mknod(filepath.Join(t.TempDir(), "null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		Skip(t, "needs to make device nodes (CAP_MKNOD): "+err.Error())
	}
}

// Command returns the path of a program, also from the directories that only root has in PATH.
func Command(t testing.TB, name string) string {
	t.Helper()
	for _, file := range []string{name, "/usr/sbin/" + name, "/sbin/" + name, "/usr/local/sbin/" + name} {
		if path, err := exec.LookPath(file); err == nil {
			return path
		}
	}
	Skip(t, "needs "+name+"; install it with scripts/setup")
	return ""
}
