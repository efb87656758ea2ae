package testenv

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// The main goroutine locks the main thread, so that no test runs on it: that thread does not end with a goroutine, and
// /proc shows its namespaces for the process.
func init() { runtime.LockOSThread() }

// MountNamespace gives the test's thread a mount namespace of its own, until the test ends.
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

// MountPoint makes a directory a mount point until the test ends, as runtimes do with a container's root.
// MountNamespace must have been called.
func MountPoint(t testing.TB, dir string) {
	t.Helper()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// SmallDisk mounts a file system of 64 KiB, with flags of mount(2), on a directory that it makes. The test needs root.
func SmallDisk(t testing.TB, dir string, flags uintptr) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", dir, "tmpfs", flags, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}
