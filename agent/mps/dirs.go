package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"gpu-cdi-plugin/internal/unixsocket"
)

// The names in a GPU's directory. The directory is named after the GPU's UUID.
const (
	pipeName      = "pipe"        // has the sockets of the daemon
	shmName       = "shm"         // is the /dev/shm of the daemon and of its clients
	librariesName = "libraries"   // has links to the driver's libraries
	statusName    = "status.sock" // the socket on which the service asks for the status
	lockName      = "lock"        // the file that the process which runs the daemon locks
)

// devShm is the directory in which CUDA has its shared memory. A daemon and its clients must have the same file system
// there.
const devShm = "/dev/shm"

// longestSocket is the longest name of a socket in a pipe directory.
const longestSocket = "control_privileged"

// isUUID reports whether a name has the form of a GPU's UUID.
func isUUID(name string) bool {
	uuid, ok := strings.CutPrefix(name, "GPU-")
	return ok && uuid != "" && len(name) < 64 && strings.Trim(uuid, "0123456789abcdefABCDEF-") == ""
}

// makeDirs makes a GPU's directories. Containers may have the directory "pipe" mounted, so it is emptied, not
// replaced.
func makeDirs(dir, uuid string) error {
	gpuDir := filepath.Join(dir, uuid)
	pipe := filepath.Join(gpuDir, pipeName)
	if n := len(filepath.Join(pipe, longestSocket)); n > unixsocket.MaxPath {
		return fmt.Errorf("make the directories of %s: the paths of sockets in %s would have %d bytes, more than %d; "+
			"set a shorter runtime-dir", uuid, dir, n, unixsocket.MaxPath)
	}
	if err := os.MkdirAll(pipe, 0o755); err != nil {
		return fmt.Errorf("make the directories of %s: %w", uuid, err)
	}
	// A daemon that did not end cleanly leaves its sockets and locks behind.
	entries, err := os.ReadDir(pipe)
	if err != nil {
		return fmt.Errorf("empty the directory of sockets: %w", err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(pipe, e.Name())); err != nil {
			return fmt.Errorf("empty the directory of sockets: %w", err)
		}
	}
	return nil
}

// checkShm returns an error unless the directory "shm" of the GPU is this process's /dev/shm. In a pod the daemons of
// all GPUs share one /dev/shm, which is dir/shm. If a GPU has no "shm" of its own, it gets a link to dir/shm.
func checkShm(dir, uuid string) error {
	path := filepath.Join(dir, uuid, shmName)
	if err := os.Symlink("../"+shmName, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("link the shared memory of %s: %w", uuid, err)
	}
	shared, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("%w: find the shared memory of %s: %w", ErrShm, uuid, err)
	}
	own, err := os.Stat(devShm)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrShm, err)
	}
	if !os.SameFile(shared, own) {
		return fmt.Errorf("%w: the directory %s is not %s", ErrShm, devShm, path)
	}
	return nil
}

// linkLibraries makes a directory with links to the driver's libraries and returns its path.
func linkLibraries(gpuDir string, libraries map[string]string) (string, error) {
	dir := filepath.Join(gpuDir, librariesName)
	if err := os.RemoveAll(dir); err != nil {
		return "", fmt.Errorf("link the driver's libraries: %w", err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("link the driver's libraries: %w", err)
	}
	for name, path := range libraries {
		if name != filepath.Base(name) {
			return "", fmt.Errorf("link the driver's library %s: %q is not a file name", path, name)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			return "", fmt.Errorf("link the driver's library %s: %w", name, err)
		}
	}
	return dir, nil
}
