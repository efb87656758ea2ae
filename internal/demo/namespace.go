package demo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// cdiDir is the directory of CDI specs that counts most for engines; older podman knows no flag to name another.
const cdiDir = "/var/run/cdi"

// withCDIDir calls do where dir is at /var/run/cdi: in a mount namespace that only do's thread, and the programs that
// do starts, are in. The host's own directory stays as it is; one that is not there is made for the time.
func withCDIDir(dir string, do func() error) error {
	err := os.Mkdir(cdiDir, 0o755)
	switch {
	case err == nil:
		defer os.Remove(cdiDir)
	case !errors.Is(err, fs.ErrExist):
		return fmt.Errorf("make a mount point for the CDI directory: %w", err)
	}
	done := make(chan error)
	go func() {
		// The thread is never unlocked, so it ends with the goroutine and takes its namespace with it.
		runtime.LockOSThread()
		if err := enterNamespace(dir); err != nil {
			done <- err
			return
		}
		done <- do()
	}()
	return <-done
}

func enterNamespace(dir string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// podman's locks are in /dev/shm; those of the host's own podman are not ours.
	if err := unix.Mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		return fmt.Errorf("mount a private /dev/shm: %w", err)
	}
	if err := unix.Mount(dir, cdiDir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", dir, cdiDir, err)
	}
	return nil
}

// maxDir is the length of a directory's name that podman still takes for its state, with the names in it.
const maxDir = 36

// MakeDir makes a temporary directory in which device nodes can be opened and libraries be loaded.
func MakeDir() (string, error) {
	var errs []error
	for _, parent := range []string{os.TempDir(), "/tmp", "/var/tmp", "/root"} {
		var st unix.Statfs_t
		if err := unix.Statfs(parent, &st); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", parent, err))
			continue
		}
		if st.Flags&(unix.ST_NODEV|unix.ST_NOEXEC) != 0 || len(filepath.Join(parent, "gpu-demo-1234567890")) > maxDir {
			errs = append(errs, fmt.Errorf("%s: mounted nodev or noexec, or its name is too long", parent))
			continue
		}
		dir, err := os.MkdirTemp(parent, "gpu-demo-")
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err)
	}
	return "", fmt.Errorf("make a temporary directory: %w", errors.Join(errs...))
}
