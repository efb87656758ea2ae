package sim

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestCreateWithoutCAP_MKNOD(t *testing.T) {
	testenv.Command(t, "cc")
	m := load(t, "workstation")
	parent := t.TempDir()
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread without CAP_MKNOD ends with the goroutine
		if err := dropMknod(); err != nil {
			result <- err
			return
		}
		_, err := Create(t.Context(), filepath.Join(parent, "node"), m, Options{})
		result <- err
	}()
	err := <-result
	if !errors.Is(err, unix.EPERM) || !errors.Is(err, ErrNoDeviceNodes) {
		t.Errorf("the error is %v", err)
	}
	if left, _ := os.ReadDir(parent); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// dropMknod takes CAP_MKNOD from the calling thread.
func dropMknod() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_MKNOD
	return unix.Capset(&header, &data[0])
}
