// Package testenv checks what tests need of the machine: root, programs, namespaces. It also has helpers for waiting.
//
// A test that cannot run is skipped with a reason. With CI=true in the environment it fails instead, since everything
// is installed in CI.
package testenv

import (
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"

	"golang.org/x/sys/unix"
)

// Skip skips the test with the reason, or fails it if CI=true.
func Skip(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("cannot run, and CI=true: %s", reason)
	}
	t.Skip(reason)
}

// Root ends the test unless the process is root and can make device nodes.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs root")
	}
	if err := unix.Mknod(filepath.Join(t.TempDir(), "null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		Skip(t, "needs to make device nodes (CAP_MKNOD): "+err.Error())
	}
}

// Command returns the path of a program. Without it the test ends.
func Command(t testing.TB, name string) string {
	t.Helper()
	path, err := proc.Look(name)
	if err != nil {
		Skip(t, "needs "+name+"; install it with scripts/setup")
	}
	return path
}
