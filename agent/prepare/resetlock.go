package prepare

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/internal/fileio"
)

// An nvidia-smi continues when the process that started it ends. So it inherits a lock file for each GPU that it
// resets, DriverReset.LockDir/UUID. The kernel unlocks the file when both processes have ended. A reset through the
// PCI device's file needs no lock, since a process cannot end during such a write.

// StillResetting returns the UUIDs of the GPUs that are still being reset by an nvidia-smi which an earlier run of
// this program started.
func (r *DriverReset) StillResetting() ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.LockDir == "" || r.running != "" {
		// All held locks are our own: no reset starts while one of an earlier run continues.
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

// lock locks GPUs, after setRunning. The caller must unlock the returned locks, also after an error.
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
		_ = l.Release() // a file that remains is not locked
	}
}
