package prepare

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/internal/fileio"
)

// When this process ends, an nvidia-smi that it started continues. So nvidia-smi inherits a lock file for each GPU
// that it resets, DriverReset.LockDir/UUID. The kernel unlocks the file when both processes have ended. A reset
// through the PCI device's file "reset" needs no lock, since a process cannot end while it writes to that file.

// StillResetting returns the UUIDs of the GPUs that an nvidia-smi is still resetting which an earlier run of this
// program started.
func (r *DriverReset) StillResetting() ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.LockDir == "" || r.running != "" {
		// All locks are held by this process: while a reset of an earlier run continues, no reset starts.
		return nil, nil
	}
	files, err := os.ReadDir(r.LockDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("find GPUs that are still being reset: %w", err)
	}
	var uuids []string
	for _, f := range files {
		held, err := fileio.IsHeld(filepath.Join(r.LockDir, f.Name()))
		if err != nil {
			return nil, fmt.Errorf("find GPUs that are still being reset: %w", err)
		}
		if held {
			uuids = append(uuids, f.Name())
		}
	}
	return uuids, nil
}

// lock locks GPUs. It is called after setRunning. The caller must unlock the locks that it returns, even if there is
// an error.
func (r *DriverReset) lock(gpus []Device) (locks []*fileio.Lock, err error) {
	if r.LockDir == "" {
		return nil, nil
	}
	if err := os.MkdirAll(r.LockDir, 0o700); err != nil {
		return nil, err
	}
	for _, d := range gpus {
		l, err := fileio.AcquireLock(filepath.Join(r.LockDir, d.GPU))
		if err != nil {
			return locks, err
		}
		locks = append(locks, l)
	}
	return locks, nil
}

func unlock(locks []*fileio.Lock) {
	for _, l := range locks {
		_ = l.Release() // the file may stay, but it is not locked
	}
}
