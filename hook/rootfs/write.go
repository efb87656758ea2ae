package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"strconv"

	"golang.org/x/sys/unix"
)

// Symlink creates a symbolic link to target, and missing directories above it. It replaces another link or a file, but
// not a directory or a mount point. It does not touch a link that is right already, or a file that is the target under
// another name: an engine has mounted it in both places.
func (r *Root) Symlink(target, name string) error {
	if r.isLink(target, name) || r.isTarget(target, name) {
		return nil
	}
	dir, err := r.ownDir(path.Dir(name))
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	defer closeQuietly(dir)
	link := func(name string) error { return unix.Symlinkat(target, int(dir.Fd()), name) }
	base := path.Base(name)
	if err = link(base); errors.Is(err, unix.EEXIST) {
		err = replace(dir, base, link)
	}
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	return nil
}

func (r *Root) isLink(target, name string) bool {
	f, err := r.open(name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return false
	}
	defer closeQuietly(f)
	buf := make([]byte, len(target)+1)
	n, err := unix.Readlinkat(int(f.Fd()), "", buf)
	return err == nil && string(buf[:n]) == target
}

// isTarget reports whether the regular file with that name is the file to which the link would lead.
func (r *Root) isTarget(target, name string) bool {
	info, err := r.Lstat(name)
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	if !path.IsAbs(target) {
		target = path.Join(path.Dir(name), target)
	}
	there, err := r.Stat(target)
	return err == nil && os.SameFile(info, there)
}

// WriteFile creates a regular file with that content and mode, whatever the umask, and missing directories above it. It
// replaces another file or a link, but not a directory or a mount point. It does not touch a file that is right
// already.
func (r *Root) WriteFile(name string, data []byte, mode fs.FileMode) error {
	if r.isSame(name, data, mode) {
		return nil
	}
	dir, err := r.ownDir(path.Dir(name))
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer closeQuietly(dir)
	err = replace(dir, path.Base(name), func(temp string) error {
		return create(dir, temp, data, mode)
	})
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func (r *Root) isSame(name string, data []byte, mode fs.FileMode) bool {
	info, err := r.Lstat(name)
	if err != nil || info.Mode() != mode || info.Size() != int64(len(data)) {
		return false
	}
	now, err := r.ReadFile(name, info.Size())
	return err == nil && bytes.Equal(now, data)
}

// create writes a new file, and removes it again after an error.
func create(dir *os.File, name string, data []byte, mode fs.FileMode) error {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(int(dir.Fd()), name, flags, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(data)
	// The mode is set last, so that readers never see part of the content.
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err != nil {
		return errors.Join(err, unix.Unlinkat(int(dir.Fd()), name, 0))
	}
	return nil
}

// replace creates a file with mk under a temporary name and renames it to name. It refuses to replace a directory.
func replace(dir *os.File, name string, mk func(temp string) error) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return unix.EISDIR
	}
	temp, err := makeTemp(name, mk)
	if err != nil {
		return err
	}
	if err := unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), name); err != nil {
		return errors.Join(err, unix.Unlinkat(int(dir.Fd()), temp, 0))
	}
	return nil
}

// makeTemp calls mk with a temporary name in the same directory, until it gets a name that no file has.
func makeTemp(name string, mk func(temp string) error) (temp string, err error) {
	for range 100 {
		temp = "." + name[:min(len(name), 200)] + "." + strconv.FormatUint(rand.Uint64(), 36)
		if err = mk(temp); !errors.Is(err, unix.EEXIST) {
			break
		}
	}
	return temp, err
}

// ownDir opens a directory for changes. It creates a missing directory with mode 0755 less the umask. It returns
// ErrVolume unless the directory is on the root's own mount or in the container's own /dev, whatever path led there.
func (r *Root) ownDir(name string) (*os.File, error) {
	dir, err := r.open(name, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) && name != "/" {
		dir, err = r.mkdir(name)
	}
	if err != nil {
		return nil, err
	}
	if err := r.checkOwnMount(dir); err != nil {
		closeQuietly(dir)
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return dir, nil
}

// mkdir creates a directory and missing directories above it. It does not follow a dangling link.
func (r *Root) mkdir(name string) (*os.File, error) {
	parent, err := r.ownDir(path.Dir(name))
	if err != nil {
		return nil, err
	}
	defer closeQuietly(parent)
	base := path.Base(name)
	err = unix.Mkdirat(int(parent.Fd()), base, 0o755)
	switch {
	case errors.Is(err, unix.EEXIST):
	case err != nil:
		return nil, &os.PathError{Op: "mkdir", Path: name, Err: err}
	default:
		if err := r.record("the directory "+name, parent, base, true); err != nil {
			return nil, &os.PathError{Op: "mkdir", Path: name, Err: err}
		}
	}
	return openat(parent, base, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
}
