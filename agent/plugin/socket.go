package plugin

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wake"
)

const (
	kubeletSocketName = "kubelet.sock"
	socketPrefix      = "gpu-cdi-"
	socketSuffix      = ".sock"
)

// socketPath returns the path of a resource's socket, such as DIR/gpu-cdi-nvidia-com-gpu.sock. If that is too long for
// a socket, or another resource has it, a hash takes the place of the resource's name.
func socketPath(dir, name string, taken func(path string) bool) string {
	plain := strings.NewReplacer("/", "-", ".", "-").Replace(name)
	path := filepath.Join(dir, socketPrefix+plain+socketSuffix)
	if len(path) <= unixsocket.MaxPath && !taken(path) {
		return path
	}
	return filepath.Join(dir, hashedName(name))
}

// besidePath returns the path of a resource's socket for an instance that begins while another has the planned path. No
// other resource has that path: planned names have no other dot, and names of resources no other slash.
func besidePath(planned, name string) string {
	path := strings.TrimSuffix(planned, socketSuffix) + ".2" + socketSuffix
	if len(path) <= unixsocket.MaxPath {
		return path
	}
	return filepath.Join(filepath.Dir(planned), hashedName(name+"/2"))
}

// lockPath returns the path of a socket's lock.
func lockPath(socket string) string {
	return filepath.Join(filepath.Dir(socket), "."+filepath.Base(socket)+".lock")
}

func hashedName(name string) string {
	sum := sha256.Sum256([]byte(name))
	return socketPrefix + hex.EncodeToString(sum[:8]) + socketSuffix
}

// checkLength returns ErrLongPath if the path of a socket in dir could be too long.
func checkLength(dir string) error {
	limit := unixsocket.MaxPath - len("/") - len(hashedName(""))
	if n := len(filepath.Clean(dir)); n > limit {
		return fmt.Errorf("%w: %s has %d bytes; use one of at most %d, since the path of a socket has at most %d",
			ErrLongPath, dir, n, limit, unixsocket.MaxPath)
	}
	return nil
}

// socket is a unix socket on which the plugin listens.
type socket struct {
	*net.UnixListener
	path  string
	id    unixsocket.ID // zero if another program removed the socket at once
	ended atomic.Bool   // whether the server of the socket has returned
	conns *connections
}

// Accept implements net.Listener.
func (s *socket) Accept() (net.Conn, error) {
	c, err := s.AcceptUnix()
	if err != nil {
		return nil, err
	}
	s.conns.open.Add(1)
	return &conn{UnixConn: c, closed: sync.OnceFunc(s.conns.closed)}, nil
}

// connections counts the open connections of an endpoint.
type connections struct {
	open atomic.Int32
	lost atomic.Bool // whether the last one was closed
	wake wake.Chan   // woken then
}

func (c *connections) closed() {
	if c.open.Add(-1) == 0 {
		c.lost.Store(true)
		c.wake.Wake()
	}
}

// conn is a connection of the kubelet.
type conn struct {
	*net.UnixConn
	closed func()
}

// Close implements net.Conn.
func (c *conn) Close() error {
	defer c.closed()
	return c.UnixConn.Close()
}

// listen listens on a socket to which only root can connect. It replaces an existing socket: the caller holds the
// lock, so no other instance listens there. If the file at the path is not a socket, that is an error.
func listen(ctx context.Context, path string, conns *connections) (*socket, error) {
	l, err := unixsocket.Listen(ctx, path, unixsocket.OwnerOnly)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	id, _ := unixsocket.Identify(path)
	return &socket{UnixListener: l, path: path, id: id, conns: conns}, nil
}

// inPlace reports whether the socket's file is still at its path.
func (s *socket) inPlace() bool {
	id, err := unixsocket.Identify(s.path)
	return err == nil && id == s.id
}
