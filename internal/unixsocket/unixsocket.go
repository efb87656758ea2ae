// Package unixsocket listens on unix sockets that only their owner can connect to, and tells sockets at one path
// apart.
package unixsocket

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxPath is the longest path of a unix socket, in bytes: sun_path of unix(7) without its final NUL.
const MaxPath = 107

// Listen listens at a path that no file has. The file gets its mode before it has a name: a chmod afterwards would come
// too late.
func Listen(ctx context.Context, path string) (*net.UnixListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var chmod error
		if err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return chmod
	}}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// ID identifies a unix socket among all that were at the same path; the zero value is none. The kernel may give a new
// file the inode of a removed one, so the modification time, which a socket keeps, is part of it.
type ID struct {
	device, inode uint64
	modified      unix.Timespec
}

// Identify returns the ID of the socket at a path, after following links. With an error it is the zero value.
func Identify(path string) (ID, error) {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return ID{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if s.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return ID{}, fmt.Errorf("%s is not a socket: remove it", path)
	}
	return ID{s.Dev, s.Ino, s.Mtim}, nil
}
