package node

import (
	"errors"
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

// acquire acquires all locks or, after an error, none.
func (r *Reconciler) acquire() error {
	for _, l := range r.locks() {
		if err := l.hold(); err != nil {
			return errors.Join(err, r.release())
		}
	}
	return nil
}

func (r *Reconciler) release() error {
	var errs []error
	for _, l := range r.locks() {
		errs = append(errs, l.release())
	}
	return errors.Join(errs...)
}
