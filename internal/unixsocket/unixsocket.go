// Package unixsocket listens on unix sockets that only their owner and a group can connect to, and tells sockets at one
// path apart.
package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxPath is the longest path of a unix socket, in bytes: sun_path of unix(7) without its final NUL.
const MaxPath = 107

// OwnerOnly is the group of a socket that only its owner can connect to.
const OwnerOnly = -1

// Listen listens at a path, for its owner and the group with that GID, or OwnerOnly. It replaces a socket that is
// there: the caller knows, by a lock or by connecting to it, that no process listens on it. Any other file is an error.
func Listen(ctx context.Context, path string, group int) (*net.UnixListener, error) {
	if err := removeSocket(path); err != nil {
		return nil, err
	}
	l, err := listen(ctx, path)
	if err != nil || group == OwnerOnly {
		return l, err
	}
	if err := admit(path, group); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func removeSocket(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is not a socket: remove it", path)
	}
	return os.Remove(path)
}

// listen makes the socket. The file gets its mode before it has a name: a chmod afterwards would come too late.
func listen(ctx context.Context, path string) (*net.UnixListener, error) {
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

func admit(path string, group int) error {
	if err := os.Lchown(path, -1, group); err != nil {
		return err
	}
	return os.Chmod(path, 0o660)
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
