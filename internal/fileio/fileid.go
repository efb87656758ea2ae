package fileio

import "golang.org/x/sys/unix"

// ID identifies a file and its version: it changes whenever the file changes, and for a directory whenever an entry is
// added or removed. The zero value means that the file does not exist. The fields are those of stat(2).
type ID struct {
	Dev, Ino, Rdev, Links uint64
	Size                  int64
	Mode                  uint32
	Modified, Changed     unix.Timespec
}

// IsZero reports whether the file does not exist.
func (id ID) IsZero() bool { return id == ID{} }

// IDOf returns the ID of the file at a path, after following links.
func IDOf(path string) ID {
	var s unix.Stat_t
	if path == "" || unix.Stat(path, &s) != nil {
		return ID{}
	}
	links := uint64(s.Nlink) //nolint:unconvert // uint32 on arm64
	return ID{s.Dev, s.Ino, s.Rdev, links, s.Size, s.Mode, s.Mtim, s.Ctim}
}
