package pluginsocket

import (
	"errors"
	"os"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
)

// settled is the age from which a lock that nobody holds is that of an instance that was killed, and not of one that
// begins: an instance does not yet hold the lock in the moment in which it makes the lock's file.
const settled = time.Second

// clear removes what an instance that was killed has left at the other path: a kubelet that finds a socket in its
// registry directory connects to it again and again. What is younger than the age is left.
func (s *Socket) clear(age time.Duration) {
	path := s.other()
	if s.cleared != nil { // another attempt would fail too, and wake who watches the directory
		return
	}
	if !isOlder(path, age) && !isOlder(lockPath(path), age) { // in most cases neither exists
		return
	}
	removed, err := removeUnlocked(path)
	if err != nil {
		s.cleared = err
		s.opts.Log.Warn("the socket " + path + " of an instance that has ended cannot be removed: " + err.Error())
	}
	if removed {
		s.opts.Log.Info("the socket " + path + " is removed: the instance that made it was killed")
	}
}

func isOlder(path string, age time.Duration) bool {
	info, err := os.Lstat(path)
	return err == nil && time.Since(info.ModTime()) >= age
}

// removeUnlocked removes a socket and its lock's file if no process holds the lock.
func removeUnlocked(path string) (removed bool, err error) {
	if held, err := fileio.IsHeld(lockPath(path)); held || err != nil {
		return false, err
	}
	lock, err := fileio.AcquireLock(lockPath(path))
	if errors.Is(err, fileio.ErrHeld) { // by a process that has just begun
		return false, nil
	}
	if err != nil {
		return false, err
	}
	err = errors.Join(unixsocket.Remove(path), lock.Release())
	return err == nil, err
}
