// Package lock makes sure that one process at a time does something on a node. The kernel drops a lock with its process,
// however that ends, so there is no stale one.
package lock

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrHeld is that another process holds the lock.
var ErrHeld = errors.New("another instance holds it")

// Lock is a locked file. It is not for concurrent use.
type Lock struct {
	path string
	file *os.File
}

// Acquire locks the file at path, which is made if need be. If another process holds it, the error is ErrHeld.
func Acquire(path string) (*Lock, error) {
	f, err := acquire(path)
	if err != nil {
		return nil, err
	}
	return &Lock{path: path, file: f}, nil
}

func acquire(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			return nil, refused(path, err)
		}
		// Who held it may have removed the file between the two calls; then the lock is on a file that nobody else sees.
		if isAt(f, path) {
			return f, nil
		}
		_ = f.Close()
	}
}

func refused(path string, err error) error {
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("lock %s: %w", path, err)
	}
	return fmt.Errorf("lock %s: %w", path, ErrHeld)
}

// isAt reports whether f is what path names.
func isAt(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(mine, there)
}

// Renew makes the file again if it was removed, so that the lock still keeps others out. If another process was quicker,
// the error is ErrHeld, and the lock is lost.
func (l *Lock) Renew() error {
	if isAt(l.file, l.path) {
		return nil
	}
	f, err := acquire(l.path)
	if err != nil {
		return err
	}
	_ = l.file.Close()
	l.file = f
	return nil
}

// Release removes the file and gives the lock up.
func (l *Lock) Release() error {
	var err error
	if isAt(l.file, l.path) {
		err = os.Remove(l.path)
	}
	if err = errors.Join(err, l.file.Close()); err != nil {
		return fmt.Errorf("unlock %s: %w", l.path, err)
	}
	return nil
}
