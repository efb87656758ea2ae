package mps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/unixsocket"
)

// The names in a GPU's directory, which has the GPU's UUID as its name in Options.Dir.
const (
	pipeName   = "pipe"        // the daemon's sockets
	logName    = "log"         // the daemon's logs
	shmName    = "shm"         // the /dev/shm of the daemon and its clients
	recordName = "daemon.json" // the daemon's process; see record
	outputName = "output.log"  // what the daemon prints
)

// lockName is a file in Options.Dir that one supervisor at a time locks.
const lockName = "lock"

// isUUID reports whether a name has the form of a GPU's UUID, which names its directory.
func isUUID(name string) bool {
	uuid, ok := strings.CutPrefix(name, "GPU-")
	return ok && uuid != "" && len(name) < 64 && strings.Trim(uuid, "0123456789abcdefABCDEF-") == ""
}

// longestSocket is the longest name of a socket in a pipe directory.
const longestSocket = "control_privileged"

// prepare makes a GPU's directories, with the right owners and modes and never through a link, and mounts its shm with
// that size in bytes. Every user may connect in pipe, which only root may change.
func prepare(dir, uuid string, shm uint64) error {
	if !isUUID(uuid) {
		return fmt.Errorf("make the directories of %q: not the UUID of a GPU", uuid)
	}
	if n := len(filepath.Join(dir, uuid, pipeName, longestSocket)); n > unixsocket.MaxPath {
		return fmt.Errorf("make the directories of %s: the paths of sockets in %s would have %d bytes, more than %d; "+
			"set a shorter runtime-dir", uuid, dir, n, unixsocket.MaxPath)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory of MPS: %w", err)
	}
	gpu, err := makeDir(unix.AT_FDCWD, filepath.Join(dir, uuid), 0o755)
	if err != nil {
		return err
	}
	defer gpu.Close()
	for _, sub := range []struct {
		name string
		mode uint32
	}{{pipeName, 0o755}, {logName, 0o755}, {shmName, 0o1777}} {
		d, err := makeDir(int(gpu.Fd()), sub.name, sub.mode)
		if err != nil {
			return fmt.Errorf("in %s: %w", gpu.Name(), err)
		}
		_ = d.Close()
	}
	return mountShm(filepath.Join(dir, uuid), shm)
}

// makeDir makes a directory, or takes over an existing one, with that mode and this process's user as the owner.
// atomicfile.MakeDir would leave the mode and the owner of an existing one as they are.
func makeDir(at int, name string, mode uint32) (*os.File, error) {
	if err := unix.Mkdirat(at, name, mode); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	if err := unix.Fchown(fd, os.Geteuid(), -1); err != nil {
		_ = f.Close()
		return nil, &os.PathError{Op: "chown", Path: name, Err: err}
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		_ = f.Close()
		return nil, &os.PathError{Op: "chmod", Path: name, Err: err}
	}
	return f, nil
}

// maxLog bounds the logs of a daemon, in bytes each: the runtime directory is in memory.
const maxLog = 1 << 20

// truncateLogs empties the logs of a daemon that have grown too large. The daemon appends to them.
func truncateLogs(gpuDir string) {
	for _, name := range []string{outputName, logName + "/control.log", logName + "/server.log"} {
		f, err := os.OpenFile(filepath.Join(gpuDir, name), os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && info.Size() > maxLog {
			_ = f.Truncate(0)
		}
		_ = f.Close()
	}
}

// outputTail is the end of what a daemon printed, or empty.
func outputTail(gpuDir string) string {
	f, err := os.Open(filepath.Join(gpuDir, outputName))
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	const length = 300
	text := make([]byte, length)
	n, _ := f.ReadAt(text, max(0, info.Size()-length))
	return string(text[:n])
}
