// Package unixsocket listens on unix sockets that only their owner can connect to.
package unixsocket

import (
	"context"
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
