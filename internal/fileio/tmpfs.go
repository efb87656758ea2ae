package fileio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MakeDirsAt opens a directory below an open one. It creates the directories of the path that do not exist, with mode
// 0755 whatever the umask. It follows no symbolic link, and ".." is an error.
func MakeDirsAt(base *os.File, path string) (*os.File, error) {
	fd, err := unix.Openat(int(base.Fd()), ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: base.Name(), Err: err}
	}
	dir := os.NewFile(uintptr(fd), base.Name())
	for name := range strings.SplitSeq(filepath.Clean(path), "/") {
		if name == "" || name == "." {
			continue
		}
		next, err := makeDirAt(dir, name, filepath.Join(base.Name(), path))
		_ = dir.Close()
		if err != nil {
			return nil, err
		}
		dir = next
	}
	return dir, nil
}

func makeDirAt(parent *os.File, name, path string) (*os.File, error) {
	if name == ".." {
		return nil, &fs.PathError{Op: "mkdir", Path: path, Err: fs.ErrInvalid}
	}
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(int(parent.Fd()), name, flags, 0)
	isNew := errors.Is(err, fs.ErrNotExist)
	if isNew {
		if err := unix.Mkdirat(int(parent.Fd()), name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, &fs.PathError{Op: "mkdir", Path: path, Err: err}
		}
		fd, err = unix.Openat(int(parent.Fd()), name, flags, 0)
	}
	name = filepath.Join(parent.Name(), name)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%s is no directory, and symbolic links are not followed here: remove it", name)
	case err != nil:
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	dir := os.NewFile(uintptr(fd), name)
	if isNew {
		if err := dir.Chmod(0o755); err != nil { // whatever the umask
			_ = dir.Close()
			return nil, err
		}
	}
	return dir, nil
}

// MountTmpfs mounts a tmpfs over an open directory, unless that is a mount point of another file system already. The
// options are those of tmpfs(5), such as "size=64m,mode=1777".
func MountTmpfs(dir *os.File, source, options string) error {
	var own, parent unix.Stat_t
	if err := errors.Join(unix.Fstat(int(dir.Fd()), &own), unix.Fstatat(int(dir.Fd()), "..", &parent, 0)); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", dir.Name(), err)
	}
	if own.Dev != parent.Dev {
		return nil
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount(source, fdPath(dir), "tmpfs", flags, options); err != nil {
		return fmt.Errorf("mount a tmpfs at %s with the options %s: %w", dir.Name(), options, err)
	}
	return nil
}

// fdPath is a path of an open file, whatever its names lead to now.
func fdPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }
