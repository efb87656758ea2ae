// Package fileid tells, without reading it, whether a file or a directory is what it was.
package fileid

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// ID tells one content of a path from another. Anything that is done to a file changes it, and so does an entry that comes
// to a directory or leaves it. The zero value is that of no file. The fields are those of stat(2).
type ID struct {
	Dev, Ino, Rdev, Links uint64
	Size                  int64
	Mode                  uint32
	Modified, Changed     unix.Timespec
}

// IsZero reports whether there is no file.
func (id ID) IsZero() bool { return id == ID{} }

// Same reports whether both are of the same file, whatever was done to it.
func (id ID) Same(other ID) bool { return id.Dev == other.Dev && id.Ino == other.Ino }

// tick is longer than the kernel's clock of changes stands still, 10 ms at most, and coarseTick than the times of file
// systems that round to a second, as ext4 with small inodes does, or to two, as FAT does.
const (
	tick       = 100 * time.Millisecond
	coarseTick = 2*time.Second + tick
)

// Settled reports whether the file still has a name, and a change after now would show: one shortly before leaves the times
// as they are.
func (id ID) Settled(now time.Time) bool {
	needed := tick
	if id.Changed.Nsec == 0 {
		needed = coarseTick
	}
	return id.Links > 0 && now.Sub(time.Unix(id.Changed.Unix())) > needed
}

// Of is the ID of what a path leads to.
func Of(path string) ID {
	var s unix.Stat_t
	if path == "" || unix.Stat(path, &s) != nil {
		return ID{}
	}
	return of(&s)
}

func of(s *unix.Stat_t) ID {
	return ID{s.Dev, s.Ino, s.Rdev, uint64(s.Nlink), s.Size, s.Mode, s.Mtim, s.Ctim} //nolint:unconvert // uint32 on arm64
}

// Kept is a file or a directory that is asked for its ID often. It is the same file whatever its path leads to later, so it
// takes a third of the time that looking up a path takes, or less.
type Kept struct{ fd int }

// Keep keeps what a path leads to.
func Keep(path string) (*Kept, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	k := &Kept{fd}
	runtime.AddCleanup(k, func(fd int) { _ = unix.Close(fd) }, fd)
	return k, nil
}

// ID of the file now, whose Links are 0 if it was removed. Nil has none.
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
