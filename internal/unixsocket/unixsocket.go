// Package unixsocket serves unix sockets that only their owner and a group can connect to, serves and calls HTTP on
// them, and distinguishes sockets that were at one path.
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

// MaxPath is the length of the longest path of a unix socket, in bytes: sun_path of unix(7) without the final NUL.
const MaxPath = 107

// OwnerOnly is the group of a socket to which only the owner can connect.
const OwnerOnly = -1

// Listen listens at a path, for its owner and the group with that GID; with OwnerOnly no group can connect. It replaces
// an existing socket: the caller must know, by a lock or by connecting, that no process listens on it. Any other file
// is an error.
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

// listen creates the socket. The file gets its mode before it has a name, since a chmod afterwards would be too late.
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

// ID distinguishes the sockets that were at one path; the zero value means none. A new file may get the inode of a
// removed one, so the ID also has the modification time, which a socket keeps.
type ID struct {
	device, inode uint64
	modified      unix.Timespec
}

// Identify returns the ID of the socket at a path, after following links. With an error it returns the zero value.
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
