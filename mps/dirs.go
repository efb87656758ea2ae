package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// gpuDirs are the directories that a GPU's daemon shares with its clients.
type gpuDirs struct {
	// Pipe has the daemon's sockets, Log its logs, and Shm is the /dev/shm of the daemon and its clients.
	Pipe, Log, Shm string
}

// dirsOf returns the paths of a GPU's directories in Options.Dir.
func dirsOf(dir, uuid string) gpuDirs {
	return gpuDirs{
		Pipe: filepath.Join(dir, uuid, pipeName),
		Log:  filepath.Join(dir, uuid, logName),
		Shm:  filepath.Join(dir, uuid, shmName),
	}
}

// librariesName is a directory in Options.Dir with links to the driver's libraries.
const librariesName = "lib"

// The names in a GPU's directory. Clients see the first three. Options.Dir has a file lockName too.
const (
	pipeName   = "pipe"
	logName    = "log"
	shmName    = "shm"
	recordName = "daemon.json"
	lockName   = "lock"
	outputName = "output.log"
)

// uuidForm is the form of a GPU's UUID, which names its directory.
var uuidForm = regexp.MustCompile(`^GPU-[0-9A-Za-z-]{1,59}$`)

// The path of a socket may have maxSocket bytes: sun_path of unix(7), without the NUL.
const (
	longestSocket = "/control_privileged"
	maxSocket     = 107
)

// prepare makes a GPU's directories, with the right owners and modes and never through a link, and mounts its shm with
// that size in bytes. Every user may connect in pipe, which only root may change.
func prepare(dir, uuid string, shm uint64) error {
	if err := makeDirs(dir, uuid); err != nil {
		return err
	}
	return mountShm(filepath.Join(dir, uuid), shm)
}

func makeDirs(dir, uuid string) error {
	if !uuidForm.MatchString(uuid) {
		return fmt.Errorf("make the directories of %q: not the UUID of a GPU", uuid)
	}
	if n := len(dirsOf(dir, uuid).Pipe) + len(longestSocket); n > maxSocket {
		return fmt.Errorf("make the directories of %s: the paths of sockets in %s would have %d bytes, more than %d; "+
			"set a shorter runtime-dir", uuid, dir, n, maxSocket)
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
	return nil
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

// linkLibraries updates the directory with links to the driver's libraries. Running daemons look there for the
// libraries of their servers, so it is changed link by link.
func linkLibraries(dir string, libraries map[string]string) error {
	in := filepath.Join(dir, librariesName)
	if len(libraries) == 0 {
		return nil
	}
	if err := os.MkdirAll(in, 0o755); err != nil {
		return fmt.Errorf("make the directory of libraries: %w", err)
	}
	for name, path := range libraries {
		if err := link(in, name, path); err != nil {
			return fmt.Errorf("link the driver's library %s: %w", name, err)
		}
	}
	entries, err := os.ReadDir(in)
	if err != nil {
		return fmt.Errorf("read the directory of libraries: %w", err)
	}
	for _, e := range entries {
		if libraries[e.Name()] != "" {
			continue
		}
		if err := os.Remove(filepath.Join(in, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a library of another driver: %w", err)
		}
	}
	return nil
}

// link makes a link, or replaces it atomically.
func link(in, name, target string) error {
	if name == "" || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("%q is not a file name", name)
	}
	at := filepath.Join(in, name)
	if now, err := os.Readlink(at); err == nil && now == target {
		return nil
	}
	fresh := filepath.Join(in, "."+name)
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, fresh); err != nil {
		return err
	}
	return os.Rename(fresh, at)
}
