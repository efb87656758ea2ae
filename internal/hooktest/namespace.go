package hooktest

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// MountNamespace moves the test's thread to a mount namespace of its own, for the rest of the test.
func MountNamespace(t testing.TB) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
}
