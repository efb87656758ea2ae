// Package unixsocket serves unix sockets to which only their owner and a group can connect, and serves and calls HTTP
// on them. It can tell apart sockets that were at one path one after the other.
package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// MaxPath is the length of the longest path of a unix socket, in bytes: sun_path of unix(7) without the final NUL.
const MaxPath = 107

// OwnerOnly is the group of a socket to which only the owner can connect.
const OwnerOnly = -1

// Listen listens at a path, for its owner and the group with that GID; with OwnerOnly no group can connect. It
// replaces an existing socket: the caller must know, by a lock or by connecting, that no process listens on that
// socket. If another kind of file is there, that is an error.
func Listen(ctx context.Context, path string, group int) (*net.UnixListener, error) {
	if err := Remove(path); err != nil {
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

// Dial connects to the socket at a path. The last element is not followed if it is a symbolic link.
func Dial(ctx context.Context, path string) (net.Conn, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	conn, err := connect(ctx, "/proc/self/fd/"+strconv.Itoa(fd))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", path, err)
	}
	return conn, nil
}

const (
	// fullTime is how long a client tries to connect while the listener's queue is full.
	fullTime = 10 * time.Second
	// maxPause is the longest time between two attempts.
	maxPause = 50 * time.Millisecond
)

// connect connects to an address. While the listener's queue is full, as when a user connects in a loop, it tries
// again: Go's sockets do not block, so that the kernel does not have them wait.
func connect(ctx context.Context, address string) (net.Conn, error) {
	until := time.Now().Add(fullTime)
	for pause := time.Millisecond; ; pause = min(2*pause, maxPause) {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", address)
		if !errors.Is(err, unix.EAGAIN) {
			return c, err
		}
		if !time.Now().Before(until) {
			return nil, fmt.Errorf("too many programs have connected to the socket at a time for %v: %w", fullTime, err)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// Remove removes the socket at a path, if there is one. If another kind of file is there, that is an error.
func Remove(path string) error {
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

// listen creates the socket. The file gets its mode before it has a name: after a later chmod, a process might already
// have connected.
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

// ID distinguishes the sockets that were at one path one after the other; the zero value means none. The inode is not
// enough, since a new file may get that of a removed one. So the ID also has the modification time, which does not
// change while a socket exists.
type ID struct {
	device, inode uint64
	modified      unix.Timespec
}

// Identify returns the ID of the socket at a path, after following links. If there is an error, the ID is the zero
// value.
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
