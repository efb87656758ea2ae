package testenv

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// The main goroutine keeps the main thread, so that no test runs on it: that thread's namespaces are those of the
// process, and it does not end with a goroutine.
func init() { runtime.LockOSThread() }

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

// MountPoint makes a directory a mount point until the end of the test, as runtimes do with a container's root. The
// test must be in a mount namespace of its own.
func MountPoint(t testing.TB, dir string) {
	t.Helper()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}
