package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/net/netutil"
	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/unixsocket"
)

const (
	// SocketName is the name of the registration socket.
	SocketName = "kubelet.sock"
	// LockName is the name of the file that a manager locks in the directory of its sockets. The file stays when the
	// manager ends: it shows the next one that all sockets in this directory may be removed.
	LockName = ".manager.lock"
	// registryLock is the name of the file that a manager locks in the plugin watcher's directory. The name is not
	// LockName, since the sockets there must not be removed.
	registryLock = ".registry.lock"
	// pluginsLabel is the SELinux label that lets containers make sockets in the directory.
	pluginsLabel = "system_u:object_r:container_file_t:s0"
)

// claim prepares the directory of the sockets, like a kubelet that starts, and locks it. It returns an error if the
// plugin watcher would search that directory.
func claim(dir, registry string, log *slog.Logger) (*fileio.Lock, error) {
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("bad socketPath, must be an absolute path: %s", dir)
	}
	if err := prepare(dir, 0o750); err != nil {
		return nil, err
	}
	if err := checkContent(dir); err != nil {
		return nil, fmt.Errorf("serve the directory %s: %w", dir, err)
	}
	if within, err := contains(registry, dir); err != nil || within {
		return nil, fmt.Errorf("watch %s for plugins: %w", registry, cmp.Or(err, ErrSameDirectory))
	}
	label(dir, log)
	held, err := fileio.AcquireLock(filepath.Join(dir, LockName))
	if errors.Is(err, fileio.ErrHeld) {
		err = fmt.Errorf("%w: %w", ErrInUse, err)
	}
	if err != nil {
		return nil, fmt.Errorf("serve the directory %s: %w", dir, err)
	}
	return held, nil
}

// claimRegistry prepares the plugin watcher's directory and locks it. Without the lock, two managers could both
// register each plugin, and both give its devices to pods.
func claimRegistry(dir string) (*fileio.Lock, error) {
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("watch for plugins: %s is not an absolute path", dir)
	}
	if err := prepare(dir, 0o755); err != nil {
		return nil, err
	}
	held, err := fileio.AcquireLock(filepath.Join(dir, registryLock))
	if errors.Is(err, fileio.ErrHeld) {
		err = fmt.Errorf("%w: %w", ErrRegistryInUse, err)
	}
	if err != nil {
		return nil, fmt.Errorf("watch %s for plugins: %w", dir, err)
	}
	return held, nil
}

// contains reports whether the directory `dir` is the directory `other` or above it, after following links. A
// directory that does not exist contains nothing.
func contains(dir, other string) (bool, error) {
	if !filepath.IsAbs(dir) {
		return false, nil
	}
	dir, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if other, err = filepath.EvalSymlinks(other); err != nil {
		return false, err
	}
	rel, err := filepath.Rel(dir, other)
	return err == nil && filepath.IsLocal(rel), err
}

// prepare makes a directory and checks that no other user can make sockets in it.
func prepare(dir string, mode fs.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return fmt.Errorf("create the directory of sockets: %w", err)
	}
	if err := trust.Dir(dir); err != nil {
		return fmt.Errorf("use the directory of sockets %s: %w", dir, err)
	}
	return nil
}

// checkContent returns an error if a directory with sockets seems to have another use, like /run: all sockets in it
// would be removed.
func checkContent(dir string) error {
	if filepath.Clean(dir) == filepath.Clean(v1beta1.DevicePluginPath) {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var foreign error
	for _, e := range entries {
		if slices.Contains([]string{SocketName, LockName, kubelet.CheckpointName}, e.Name()) {
			return nil
		}
		if e.Type() == fs.ModeSocket && foreign == nil {
			foreign = fmt.Errorf("%w: it has %q", ErrForeignDirectory, e.Name())
		}
	}
	return foreign
}

// label sets the SELinux label that plugins in containers need, if SELinux is enabled.
func label(dir string, log *slog.Logger) {
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		return
	}
	if err := setLabel(dir); err != nil {
		log.Warn("device plugins in containers may not be able to register, since the directory of their sockets has no "+
			"SELinux label", "directory", dir, "error", err)
	}
}

func setLabel(dir string) error {
	return unix.Lsetxattr(dir, "security.selinux", append([]byte(pluginsLabel), 0), 0)
}

// replaceSocket removes all sockets in the directory of a path, and listens on the path. No process may listen on the
// sockets. Plugins notice that their sockets are gone, and register again.
func replaceSocket(path string) (net.Listener, error) {
	info, err := os.Lstat(path)
	if err == nil && info.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("%s is not a socket: remove it", path)
	}
	conn, err := net.Dial("unix", path)
	switch {
	case err == nil:
		return nil, errors.Join(fmt.Errorf("%w: it accepts connections at %s", ErrInUse, path), conn.Close())
	case errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%w: its queue of connections at %s is full", ErrInUse, path)
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED):
		return nil, err
	}
	if err := removeSockets(filepath.Dir(path)); err != nil {
		return nil, err
	}
	l, err := unixsocket.Listen(context.Background(), path, unixsocket.OwnerOnly)
	if err != nil {
		return nil, err
	}
	return netutil.LimitListener(l, maxConnections), nil
}

func removeSockets(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Type() == fs.ModeSocket {
			err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return err
}
