package fileid

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// TODO: delete this file and its test when nothing uses Keep and Settled any more.

// tick is longer than the granularity of the kernel's clock for file times, 10 ms at most. coarseTick is longer than
// that of file systems that round times to a second, as ext4 with small inodes does, or to two, as FAT does.
const (
	tick       = 100 * time.Millisecond
	coarseTick = 2*time.Second + tick
)

// Settled reports whether the file has a name and a change after now would change the ID. Soon after a change another
// one may leave the times as they are.
func (id ID) Settled(now time.Time) bool {
	needed := tick
	if id.Changed.Nsec == 0 {
		needed = coarseTick
	}
	return id.Links > 0 && now.Sub(time.Unix(id.Changed.Unix())) > needed
}

// Kept is a handle of a file or a directory for repeated calls of ID, which cost a third of a lookup by path. It stays
// on that file even if its path leads to another one later.
type Kept struct{ fd int }

// Keep opens the file at a path.
func Keep(path string) (*Kept, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	k := &Kept{fd}
	runtime.AddCleanup(k, func(fd int) { _ = unix.Close(fd) }, fd)
	return k, nil
}

// ID returns the file's ID now. Its Links are 0 if the file was removed. Nil has the zero ID.
func (k *Kept) ID() ID {
	if k == nil {
		return ID{}
	}
	var s unix.Stat_t
	err := unix.Fstat(k.fd, &s)
	runtime.KeepAlive(k)
	if err != nil {
		return ID{}
	}
	return of(&s)
}
