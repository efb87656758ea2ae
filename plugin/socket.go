package plugin

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	kubeletSocketName = "kubelet.sock"
	socketPrefix      = "gpu-cdi-"
	socketSuffix      = ".sock"
	// maxSocketPath is the longest path of a unix socket, in bytes: sun_path without its final NUL.
	maxSocketPath = 107
)

// socketPath returns the path of a resource's socket: DIR/gpu-cdi-nvidia-com-gpu.sock. Where that is too long for a
// socket, a hash takes the place of the resource's name.
func socketPath(dir, name string) string {
	name = strings.NewReplacer("/", "-", ".", "-").Replace(name)
	path := filepath.Join(dir, socketPrefix+name+socketSuffix)
	if len(path) <= maxSocketPath {
		return path
	}
	return filepath.Join(dir, hashedName(name))
}

func hashedName(name string) string {
	sum := sha256.Sum256([]byte(name))
	return socketPrefix + hex.EncodeToString(sum[:8]) + socketSuffix
}

// checkLength returns ErrLongPath if a socket in dir could have too long a path.
func checkLength(dir string) error {
	limit := maxSocketPath - len("/") - len(hashedName(""))
	if n := len(filepath.Clean(dir)); n > limit {
		return fmt.Errorf("%w: %s has %d bytes, and at most %d are possible, as the path of a socket has at most %d",
			ErrLongPath, dir, n, limit, maxSocketPath)
	}
	return nil
}

// socketID identifies a unix socket among all that were at the same path. The kernel may give a new file the inode of a
// removed one, so the time of its creation is part of it.
type socketID struct {
	device, inode uint64
	created       int64 // in nanoseconds; nothing changes a socket's modification time later
}

// identify returns the ID of the socket at a path. Anything else there is an error.
func identify(path string) (socketID, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return socketID{}, err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return socketID{}, fmt.Errorf("%s is not a socket: remove it", path)
	}
	s := info.Sys().(*syscall.Stat_t)
	return socketID{device: s.Dev, inode: s.Ino, created: info.ModTime().UnixNano()}, nil
}

// socket is a unix socket that is listened on.
type socket struct {
	*net.UnixListener
	path string
	id   socketID
}

// listen listens on a socket that only root can connect to. It replaces a socket that is there: the caller holds the
// lock, so no other instance listens on it. Anything else at the path is an error. A kubelet that starts removes every
// socket in its directory; if it removes this one before it could be identified, listen makes another.
func listen(ctx context.Context, path string) (*socket, error) {
	for {
		s, err := listenOnce(ctx, path)
		if err == nil || ctx.Err() != nil || !errors.Is(err, errRemoved) {
			return s, err
		}
	}
}

var errRemoved = errors.New("another program removed the socket at once")

func listenOnce(ctx context.Context, path string) (*socket, error) {
	_, err := identify(path)
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen: %w", err)
	}
	config := net.ListenConfig{Control: ownerOnly}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	id, err := identify(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = errRemoved
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, errors.Join(err, u.Close()))
	}
	return &socket{UnixListener: u, path: path, id: id}, nil
}

// ownerOnly sets the mode of the socket's file before it has a name. A chmod afterwards would come too late.
func ownerOnly(_, _ string, c syscall.RawConn) error {
	var chmod error
	if err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) }); err != nil {
		return err
	}
	return chmod
}

// Accept returns every error as a temporary one, unless the socket is closed. gRPC's server closes its socket after any
// other error, such as a lack of memory, and its file would stay without a listener.
func (s *socket) Accept() (net.Conn, error) {
	c, err := s.UnixListener.Accept()
	return c, asTemporary(err)
}

func asTemporary(err error) error {
	if err == nil || errors.Is(err, net.ErrClosed) {
		return err
	}
	return temporary{err}
}

// temporary is an error after which gRPC's server accepts again.
type temporary struct{ error }

// Temporary is the method that gRPC's server looks for.
func (temporary) Temporary() bool { return true }

func (t temporary) Unwrap() error { return t.error }

// inPlace reports whether the socket's file is still at its path.
func (s *socket) inPlace() bool {
	id, err := identify(s.path)
	return err == nil && id == s.id
}

// remove removes the socket's file, unless another program replaced it. Call it before Close.
func (s *socket) remove() error {
	if !s.inPlace() {
		return nil
	}
	return os.Remove(s.path)
}
