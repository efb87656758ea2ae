package prestart

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/internal/lock"
)

// An nvidia-smi goes on when the process ends that has started it. So it inherits a lock for each GPU that it resets:
// files in DriverReset.LockDir with the UUIDs of the GPUs as their names. The kernel unlocks them when both have ended.
// A reset by the PCI device's file needs none, since a process does not end during such a write.

// Earlier returns the UUIDs of the GPUs that an nvidia-smi resets which a process before this one has started.
func (r *DriverReset) Earlier() ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.earlier()
}

func (r *DriverReset) earlier() ([]string, error) {
	if r.LockDir == "" || r.running != "" { // the locks are this process's: it begins no reset before those have ended
		return nil, nil
	}
	files, err := os.ReadDir(r.LockDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("find GPUs that are still being reset: %w", err)
	}
	var uuids []string
	for _, f := range files {
		held, err := lock.IsHeld(filepath.Join(r.LockDir, f.Name()))
		if err != nil {
			return nil, fmt.Errorf("find GPUs that are still being reset: %w", err)
		}
		if held {
			uuids = append(uuids, f.Name())
		}
	}
	return uuids, nil
}

// lock locks the GPUs of requests, after setRunning. Unlock those that it returns, also after an error.
func (r *DriverReset) lock(requests []*request) (locks []*lock.Lock, err error) {
	if r.LockDir == "" {
		return nil, nil
	}
	if err := os.MkdirAll(r.LockDir, 0o700); err != nil {
		return nil, err
	}
	for _, one := range requests {
		l, err := lock.Acquire(filepath.Join(r.LockDir, one.d.GPU))
		if err != nil {
			return locks, err
		}
		locks = append(locks, l)
	}
	return locks, nil
}

func unlock(locks []*lock.Lock) {
	for _, l := range locks {
		_ = l.Release() // a file that stays is not locked
	}
}
