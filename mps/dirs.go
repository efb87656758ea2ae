package mps

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/lazy"
)

// Dirs are the directories of a GPU's daemon that its clients see too.
type Dirs struct {
	// Pipe has its sockets, Log its logs, and Shm is /dev/shm for it and its clients.
	Pipe, Log, Shm string
}

// DirsOf are the directories of a GPU under Options.Dir.
func DirsOf(dir, uuid string) Dirs { return dirsIn(filepath.Join(dir, uuid)) }

func dirsIn(own string) Dirs {
	return Dirs{
		Pipe: filepath.Join(own, pipeName),
		Log:  filepath.Join(own, logName),
		Shm:  filepath.Join(own, shmName),
	}
}

// librariesName is a directory beside those of the GPUs with links to the driver's libraries.
const librariesName = "lib"

// The names in a GPU's directory. Clients see the first three. A lock is in the directory of all GPUs too.
const (
	pipeName   = "pipe"
	logName    = "log"
	shmName    = "shm"
	recordName = "daemon.json"
	lockName   = "lock"
	outputName = "output.log"
)

// uuidForm is what a name of a GPU's directory may be.
var uuidForm = lazy.Regexp(`^GPU-[0-9A-Za-z-]{1,59}$`)

// The path of a socket has room for maxSocket bytes: sun_path of unix(7), without the NUL.
const (
	longestSocket = "/control_privileged"
	maxSocket     = 107
)

// prepare makes the directories of a GPU, or takes those that a container's runtime made of missing mounts after a
// boot: with the right modes, and never through a link. Every user of a container may connect in pipe, and root alone
// may change it; shm is like /dev/shm, of that size. Where they cannot be volumes, plain says why.
func prepare(dir, uuid string, shm uint64) (plain string, err error) {
	if err := makeDirs(dir, uuid); err != nil {
		return "", err
	}
	err = eachVolume(filepath.Join(dir, uuid), shm, func(v volume, own *os.File) error {
		why, err := v.give(own)
		plain = cmp.Or(plain, why)
		return err
	})
	return plain, err
}

func makeDirs(dir, uuid string) error {
	if !uuidForm().MatchString(uuid) {
		return fmt.Errorf("make the directories of %q: not the UUID of a GPU", uuid)
	}
	if n := len(DirsOf(dir, uuid).Pipe) + len(longestSocket); n > maxSocket {
		return fmt.Errorf("make the directories of %s: sockets under %s would have paths of %d bytes, and %d are allowed; set a shorter runtime-dir",
			uuid, dir, n, maxSocket)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory of MPS: %w", err)
	}
	own, err := makeDir(unix.AT_FDCWD, filepath.Join(dir, uuid), 0o755)
	if err != nil {
		return err
	}
	defer own.Close()
	for _, sub := range []struct {
		name string
		mode uint32
	}{{pipeName, 0o755}, {logName, 0o755}, {shmName, 0o1777}} {
		d, err := makeDir(int(own.Fd()), sub.name, sub.mode)
		if err != nil {
			return fmt.Errorf("in %s: %w", own.Name(), err)
		}
		_ = d.Close()
	}
	return nil
}

// makeDir makes a directory of ours, or makes the one that is there ours.
func makeDir(at int, name string, mode uint32) (*os.File, error) {
	if err := unix.Mkdirat(at, name, mode); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	if err := own(fd, mode); err != nil {
		_ = f.Close()
		return nil, &os.PathError{Op: "take", Path: name, Err: err}
	}
	return f, nil
}

func own(fd int, mode uint32) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if uid := os.Geteuid(); int(st.Uid) != uid {
		if err := unix.Fchown(fd, uid, -1); err != nil {
			return err
		}
	}
	if st.Mode&0o7777 != mode {
		return unix.Fchmod(fd, mode)
	}
	return nil
}

// maxLog bounds what a daemon writes, in bytes: runtime directories are in memory.
const maxLog = 1 << 20

// boundLogs empties the logs of a daemon that have grown too large. They are written at their end.
func boundLogs(own string) {
	for _, name := range []string{outputName, logName + "/control.log", logName + "/server.log"} {
		f, err := os.OpenFile(filepath.Join(own, name), os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && info.Size() > maxLog {
			_ = f.Truncate(0)
		}
		_ = f.Close()
	}
}

// openOutput is the file for what a daemon prints, emptied.
func openOutput(own string) (*os.File, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC | os.O_APPEND | unix.O_NOFOLLOW
	return os.OpenFile(filepath.Join(own, outputName), flags, 0o600)
}

// tail is the end of what a daemon printed, or empty.
func tail(own string) string {
	f, err := os.Open(filepath.Join(own, outputName))
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
