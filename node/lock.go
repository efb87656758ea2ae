package node

import (
	"errors"
	"fmt"
	"path/filepath"

	"gpu-cdi-plugin/internal/fileio"
)

// fileLock prevents other instances of this program from writing the same files. An empty path locks nothing.
type fileLock struct {
	path    string
	makeDir func(dir string) error
	wrap    func(error) error // adds to an error what the lock is for
	lock    *fileio.Lock      // nil while it is not held
}

// hold acquires the lock. If it is held already but its file or directory was removed, hold acquires it again.
func (l *fileLock) hold() error {
	if l.path == "" {
		return nil
	}
	err := l.makeDir(filepath.Dir(l.path))
	switch {
	case err != nil:
	case l.lock != nil:
		err = l.lock.Renew()
	default:
		l.lock, err = fileio.AcquireLock(l.path)
	}
	if err != nil {
		return l.wrap(err)
	}
	return nil
}

func (l *fileLock) release() error {
	if l.lock == nil {
		return nil
	}
	err := l.lock.Release()
	l.lock = nil
	return err
}

// locks returns the locks of all files.
func (r *Reconciler) locks() []*fileLock {
	var list []*fileLock
	for _, f := range r.files {
		list = append(list, &f.lock)
	}
	return append(list, &r.descriptors.lock)
}

// Lock locks the files that the Reconciler writes, or none after an error. If another instance has locked one of them,
// the error wraps fileio.ErrHeld. Start calls it too.
func (r *Reconciler) Lock() error {
	defer r.monitor.setUnlocked(false)
	for _, l := range r.locks() {
		if err := l.hold(); err != nil {
			return fmt.Errorf("reconcile the node: %w", errors.Join(err, r.Unlock()))
		}
	}
	return nil
}

// Unlock ends Lock. From then on the record of the devices' health is not written either.
func (r *Reconciler) Unlock() error {
	r.monitor.setUnlocked(true)
	var errs []error
	for _, l := range r.locks() {
		errs = append(errs, l.release())
	}
	return errors.Join(errs...)
}

// OtherLocked reports whether another instance has locked one of the files that this Reconciler would lock. Call it
// after Unlock.
func (r *Reconciler) OtherLocked() (bool, error) {
	for _, l := range r.locks() {
		if l.path == "" {
			continue
		}
		if held, err := fileio.IsHeld(l.path); held || err != nil {
			return held, err
		}
	}
	return false, nil
}
