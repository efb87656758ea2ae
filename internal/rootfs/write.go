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

// Symlink makes name a symbolic link that contains target, with the directories above it. It replaces another link or
// a file, but no directory and no mount point. A link that is right already stays untouched.
func (r *Root) Symlink(target, name string) error {
	if r.isLink(target, name) {
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

// WriteFile makes name a regular file with that content and mode, whatever the umask, with the directories above it.
// What was there is replaced and not followed, unless it is a directory or a mount point. A regular file that is right
// already stays untouched.
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
	i, err := r.Lstat(name)
	if err != nil || i.Mode != mode || i.Size != int64(len(data)) {
		return false
	}
	now, err := r.ReadFile(name, i.Size)
	return err == nil && bytes.Equal(now, data)
}

// create makes a new file. On an error nothing is left.
func create(dir *os.File, name string, data []byte, mode fs.FileMode) error {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(int(dir.Fd()), name, flags, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(data)
	// The mode comes after the content, so that whoever can read the file can read all of it.
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err != nil {
		return errors.Join(err, unix.Unlinkat(int(dir.Fd()), name, 0))
	}
	return nil
}

// replace gives the name to what mk makes under a temporary one. A directory is refused before anything is made.
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

// makeTemp calls mk with random names until one is free.
func makeTemp(name string, mk func(temp string) error) (string, error) {
	for try := 0; ; try++ {
		temp := "." + name[:min(len(name), 200)] + "." + strconv.FormatUint(rand.Uint64(), 36)
		err := mk(temp)
		if !errors.Is(err, unix.EEXIST) || try > 100 {
			return temp, err
		}
	}
}

// ownDir opens a directory for changes and makes it where it is missing, with mode 0755 less the umask. checkOwn must
// admit it.
func (r *Root) ownDir(name string) (*os.File, error) {
	dir, err := r.open(name, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) && name != "/" {
		return r.mkdir(name)
	}
	if err != nil {
		return nil, err
	}
	if err := r.checkOwn(dir); err != nil {
		closeQuietly(dir)
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return dir, nil
}

// checkOwn returns ErrVolume for a directory that is neither on the root's own mount nor on that of the container's own
// /dev, whatever path led to it.
func (r *Root) checkOwn(dir *os.File) error {
	id, err := mountID(dir)
	if err == nil && id != r.mount && id != r.dev {
		err = ErrVolume
	}
	return err
}

// mkdir makes the directory name, in a parent that may be missing too. It fails where a dangling link stands in the way.
func (r *Root) mkdir(name string) (*os.File, error) {
	parent, err := r.ownDir(path.Dir(name))
	if err != nil {
		return nil, err
	}
	defer closeQuietly(parent)
	base := path.Base(name)
	if err := unix.Mkdirat(int(parent.Fd()), base, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	dir, err := openat(parent, base, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return nil, err
	}
	if err := r.checkOwn(dir); err != nil {
		closeQuietly(dir)
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return dir, nil
}
