package fileio

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrHeld means that another process holds the lock.
var ErrHeld = errors.New("another instance holds it")

// Lock is a locked file. It is not safe for concurrent use.
type Lock struct {
	path string
	file *os.File
}

// AcquireLock locks the file at path, and creates it if it is missing. If another process holds the lock, the error
// wraps ErrHeld.
func AcquireLock(path string) (*Lock, error) {
	f, err := acquire(path)
	if err != nil {
		return nil, err
	}
	return &Lock{path: path, file: f}, nil
}

// inheritedFor is how long a child process may have the locked file open before it executes its program, which closes
// the file. So a lock that was just released may seem to be held for that time.
const inheritedFor = 100 * time.Millisecond

func acquire(path string) (*os.File, error) {
	for end := time.Now().Add(inheritedFor); ; {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && isAt(f, path) {
			return f, nil
		}
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			if time.Now().Before(end) {
				time.Sleep(inheritedFor / 10) // the kernel has no event for the end of a lock
				continue
			}
			err = ErrHeld
		}
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		// The last holder removed the file after it was opened here, so other processes lock another file.
	}
}

// IsHeld reports whether a process holds the lock at path. While IsHeld runs, no process can acquire the lock.
func IsHeld(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("check the lock %s: %w", path, err)
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
		return false, fmt.Errorf("check the lock %s: %w", path, err)
	}
	return err != nil, nil
}

// isAt reports whether f is the file at path.
func isAt(f *os.File, path string) bool {
	own, err := f.Stat()
	if err != nil {
		return false
	}
	current, err := os.Lstat(path)
	return err == nil && os.SameFile(own, current)
}

// File returns the locked file. A program that inherits the open file holds the lock until it ends, even after this
// process has ended.
func (l *Lock) File() *os.File { return l.file }

// Renew creates and locks the file again if it was removed. If another process has locked a new file meanwhile, the
// error wraps ErrHeld and the lock is lost.
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

// Release removes the file and unlocks it.
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
