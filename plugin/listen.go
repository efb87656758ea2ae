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

	"gpu-cdi-plugin/internal/exit"
)

const (
	kubeletSocketName = "kubelet.sock"
	socketPrefix      = "gpu-cdi-"
	socketSuffix      = ".sock"
	// maxSocketPath is how long a unix socket's path may be: sun_path less the byte that ends it.
	maxSocketPath = 107
)

// socketPath is where a resource's socket is: gpu-cdi-nvidia-com-gpu.sock in dir. Where that is too long for a socket
// the name is a sum.
func socketPath(dir, name string) string {
	name = strings.NewReplacer("/", "-", ".", "-").Replace(name)
	path := filepath.Join(dir, socketPrefix+name+socketSuffix)
	if len(path) <= maxSocketPath {
		return path
	}
	return filepath.Join(dir, summedName(name))
}

func summedName(name string) string {
	sum := sha256.Sum256([]byte(name))
	return socketPrefix + hex.EncodeToString(sum[:8]) + socketSuffix
}

// checkLength says whether sockets of all names can be in dir.
func checkLength(dir string) error {
	limit := maxSocketPath - len("/") - len(summedName(""))
	if n := len(filepath.Clean(dir)); n > limit {
		return exit.With(exit.Usage, "give a directory with a shorter path, or a link to it", fmt.Errorf(
			"the path of the directory of sockets has %d bytes, and %d are allowed, since that of a socket has %d at most: %s",
			n, limit, maxSocketPath, dir))
	}
	return nil
}

// checkDir says why sockets cannot be in dir.
func checkDir(dir string) error {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return exit.With(exit.Unreachable, "start the kubelet, which makes the directory, or say where its own is",
			fmt.Errorf("look for the kubelet: %w", err))
	case err != nil:
		return fmt.Errorf("look for the kubelet: %w", err)
	case !info.IsDir():
		return exit.With(exit.Unreachable, "", fmt.Errorf("look for the kubelet: %s is not a directory", dir))
	}
	return nil
}

// socket is a listening unix socket that knows whether its path still leads to it.
type socket struct {
	*net.UnixListener
	path string
	file os.FileInfo // as long as it listens, no other file can have its inode
}

// listen makes a socket that only root can connect to. A socket that is there already is replaced: who holds the lock
// knows that nobody listens on it. Anything else in the way is an error. A kubelet that starts removes every socket in
// its directory; where it was quicker than this, it is done again.
func listen(ctx context.Context, path string) (*socket, error) {
	for {
		s, err := listenOnce(ctx, path)
		if err == nil || ctx.Err() != nil || !errors.Is(err, errRemoved) {
			return s, err
		}
	}
}

var errRemoved = errors.New("the socket was removed at once")

func listenOnce(ctx context.Context, path string) (*socket, error) {
	if err := clear(path); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	config := net.ListenConfig{Control: ownerOnly}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = errRemoved
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, errors.Join(err, u.Close()))
	}
	return &socket{UnixListener: u, path: path, file: info}, nil
}

// ownerOnly gives the socket's file its mode before it has a name; a chmod afterwards would come too late.
func ownerOnly(_, _ string, c syscall.RawConn) error {
	var chmod error
	if err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) }); err != nil {
		return err
	}
	return chmod
}

// clear removes a socket that is left over.
func clear(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return exit.With(exit.Failure, "remove it", fmt.Errorf("%s is in the way and is not a socket", path))
	}
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Accept returns no error but that of the end after which a server would close the socket.
func (s *socket) Accept() (net.Conn, error) {
	c, err := s.UnixListener.Accept()
	if err != nil {
		return nil, notClosing(err)
	}
	return c, nil
}

// notClosing says of every error but that of the end that it passes, such as a lack of memory: gRPC's server would close
// the socket for another one, and the socket's file would stay and lead nowhere.
func notClosing(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return err
	}
	return passing{err}
}

// passing is an error after which gRPC's server waits and goes on.
type passing struct{ error }

// Temporary is what the server looks for.
func (passing) Temporary() bool { return true }

func (p passing) Unwrap() error { return p.error }

// inPlace reports whether the path leads to the socket.
func (s *socket) inPlace() bool {
	there, err := os.Lstat(s.path)
	return err == nil && os.SameFile(s.file, there)
}

// remove removes the socket's file, if it still is the socket's. It must be called before the socket is closed.
func (s *socket) remove() error {
	if !s.inPlace() {
		return nil
	}
	return os.Remove(s.path)
}
