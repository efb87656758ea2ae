package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/unixsocket"
)

// The names in a GPU's directory. The directory is named after the GPU's UUID. The daemon of a unit can write to the
// three directories in it, but cannot replace them: root's programs use them by name, such as container runtimes.
const (
	pipeName   = "pipe" // has the sockets of the daemon
	shmName    = "shm"  // is the /dev/shm of the daemon and of its clients
	daemonName = "daemon"
)

// The names in the directory "daemon", which is for the process that runs the daemon.
const (
	librariesName = "libraries"   // has links to the driver's libraries
	statusName    = "status.sock" // the socket on which the service asks for the status
	lockName      = "lock"        // the file that the process locks
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

// Prepare makes a GPU's directories and mounts the shared memory, a tmpfs with these options of tmpfs(5) and mode 1777,
// unless it is mounted. The unit of the daemon runs it as root, outside its confinement, so it follows no link that a
// daemon could have made.
func Prepare(o Options, uuid, options string) error {
	if !isUUID(uuid) {
		return fmt.Errorf("%q is %w", uuid, ErrNotGPU)
	}
	if err := checkDir(o); err != nil {
		return err
	}
	if err := prepare(o.Dir, uuid, options); err != nil {
		return fmt.Errorf("prepare the MPS control daemon of %s: %w", uuid, err)
	}
	return nil
}

func prepare(path, uuid, options string) error {
	runtimeDir := filepath.Dir(path)
	if err := fileio.MakeDirs(runtimeDir); err != nil {
		return err
	}
	base, err := trust.OpenDirPath(runtimeDir)
	if err != nil {
		return err
	}
	defer base.Close()
	gpuDir := filepath.Join(filepath.Base(path), uuid)
	for _, name := range []string{pipeName, daemonName} {
		dir, err := fileio.MakeDirsAt(base, filepath.Join(gpuDir, name))
		if err != nil {
			return err
		}
		_ = dir.Close()
	}
	shm, err := fileio.MakeDirsAt(base, filepath.Join(gpuDir, shmName))
	if err != nil {
		return err
	}
	defer shm.Close()
	return fileio.MountTmpfs(shm, "gpu-cdi-mps", options+",mode=1777")
}

// checkDir returns an error if others than root can change what is in the directory of MPS.
func checkDir(o Options) error {
	if err := o.Check(trust.Dir, o.Dir); err != nil {
		return fmt.Errorf("MPS cannot use the directory %s; set another runtime-dir: %w", o.Dir, err)
	}
	return nil
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
	dir := filepath.Join(gpuDir, daemonName, librariesName)
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
