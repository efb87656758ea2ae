package mps

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// The unit of a daemon prepares its directories again whenever the daemon has ended, as root without confinement. A
// daemon that was taken over may have exchanged everything below the directory of MPS.
func TestPrepareFollowsNoLink(t *testing.T) {
	testenv.Root(t)
	const options = "size=1m,nr_inodes=1k"
	for name, c := range map[string]struct {
		before func(dir, target string) error
		want   string // in the error
	}{
		"nothing is there": {func(string, string) error { return nil }, ""},
		"it was prepared before": {func(dir, _ string) error {
			return os.MkdirAll(dir+"/"+testGPU+"/shm", 0o755)
		}, ""},
		"the directory of MPS is a link": {func(dir, target string) error {
			return os.Symlink(target, dir)
		}, "mps is no directory"},
		"that of the GPU is a link": {func(dir, target string) error {
			return errors.Join(os.Mkdir(dir, 0o755), os.Symlink(target, dir+"/"+testGPU))
		}, testGPU + " is no directory"},
		"the shared memory is a link": {func(dir, target string) error {
			return errors.Join(os.MkdirAll(dir+"/"+testGPU, 0o755), os.Symlink(target, dir+"/"+testGPU+"/shm"))
		}, "shm is no directory"},
		"the shared memory is a link to where nothing is": {func(dir, target string) error {
			return errors.Join(os.MkdirAll(dir+"/"+testGPU, 0o755), os.Symlink(target+"/none", dir+"/"+testGPU+"/shm"))
		}, "shm is no directory"},
		"the sockets are a link": {func(dir, target string) error {
			return errors.Join(os.MkdirAll(dir+"/"+testGPU, 0o755), os.Symlink(target, dir+"/"+testGPU+"/pipe"))
		}, "pipe is no directory"},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.MountNamespace(t)
			top := t.TempDir()
			target, dir := filepath.Join(top, "etc"), filepath.Join(top, "run", "mps")
			testenv.Must(t, os.Mkdir(target, 0o755), os.Mkdir(filepath.Dir(dir), 0o755), c.before(dir, target))
			shm := filepath.Join(dir, testGPU, shmName)
			t.Cleanup(func() { _ = unix.Unmount(shm, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) })
			for range 2 {
				err := Prepare(Options{Dir: dir, Check: allowUnsafe}, testGPU, options)
				if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
					t.Fatalf("error %v, want %q", err, c.want)
				}
			}
			mounts, err := os.ReadFile("/proc/thread-self/mounts")
			testenv.Must(t, err)
			mounted := strings.Count(string(mounts), " "+top)
			if c.want == "" && (mounted != 1 || !strings.Contains(string(mounts), "gpu-cdi-mps "+shm+" tmpfs ")) ||
				c.want != "" && mounted > 0 {
				t.Errorf("the mounts are\n%s", mounts)
			}
			if left, err := os.ReadDir(target); err != nil || len(left) > 0 {
				t.Errorf("the link's target has %v, error %v", left, err)
			}
		})
	}
	if err := Prepare(Options{Dir: t.TempDir()}, "GPU-../x", options); err == nil {
		t.Error("a name that is no UUID is prepared")
	}
}
