package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// CheckMountPoint returns an error if nothing can be mounted at a path. It changes nothing. If a file exists there,
// after following links, it must have the right type and be neither in /proc nor on a mount with propagation. If no
// file exists, MakeMountPoint must be able to make one.
func (r *Root) CheckMountPoint(name string, isDir bool) error {
	f, err := r.open(name, unix.O_PATH)
	if errors.Is(err, unix.ENOENT) {
		if f, err = r.checkParent(name); err != nil {
			return err
		}
		defer closeQuietly(f)
		return r.refuseShared(f)
	}
	if err != nil {
		return err
	}
	defer closeQuietly(f)
	if err := r.checkTarget(f, isDir); err != nil {
		return err
	}
	return r.refuseShared(f)
}

// checkTarget returns an error if a file or a directory cannot be mounted over f.
func (r *Root) checkTarget(f *os.File, isDir bool) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	root, err := r.dir.Stat()
	switch {
	case err != nil:
		return err
	case isDir && !info.IsDir():
		return unix.ENOTDIR
	case !isDir && info.IsDir():
		return unix.EISDIR
	case os.SameFile(info, root): // through a link of the image
		return errors.New("it leads to the container's root")
	}
	return refuseProc(f)
}

// checkParent opens the directory in which a missing path would be created, or its nearest ancestor that exists. Like
// ownDir it returns ErrVolume if the directory is on another mount.
func (r *Root) checkParent(name string) (*os.File, error) {
	for {
		name = path.Dir(name)
		dir, err := r.open(name, unix.O_PATH|unix.O_DIRECTORY)
		if errors.Is(err, unix.ENOENT) && name != "/" {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := r.checkOwnMount(dir); err != nil {
			closeQuietly(dir)
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if err := checkWritable(dir); err != nil {
			closeQuietly(dir)
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		return dir, nil
	}
}

// checkWritable returns EROFS if a directory is on a read-only file system or mount.
func checkWritable(dir *os.File) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return unix.EROFS
	}
	return nil
}

// MakeMountPoint creates a directory or an empty file at a path, and missing directories above it, unless the path
// exists.
func (r *Root) MakeMountPoint(name string, isDir bool) error {
	err := r.makeMountPoint(name, isDir)
	if err != nil {
		return fmt.Errorf("make the mount point %s: %w", name, err)
	}
	return nil
}

func (r *Root) makeMountPoint(name string, isDir bool) error {
	f, err := r.open(name, unix.O_PATH)
	if err == nil {
		closeQuietly(f)
		return nil
	}
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if isDir {
		dir, err := r.ownDir(name)
		if err != nil {
			return err
		}
		closeQuietly(dir)
		return nil
	}
	dir, err := r.ownDir(path.Dir(name))
	if err != nil {
		return err
	}
	defer closeQuietly(dir)
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(int(dir.Fd()), path.Base(name), flags, 0o644)
	if err != nil { // EEXIST is a link that dangles
		return err
	}
	_ = unix.Close(fd)
	return r.record("the mount point "+name, dir, path.Base(name), false)
}

// Mount mounts a detached tree, for example from open_tree, at a path, after following links.
func (r *Root) Mount(tree *os.File, isDir bool, name string) error {
	target, err := r.open(name, unix.O_PATH)
	if err != nil {
		return fmt.Errorf("mount at %s: %w", name, err)
	}
	defer closeQuietly(target)
	if err := r.checkTarget(target, isDir); err != nil {
		return fmt.Errorf("mount at %s: %w", name, err)
	}
	if err := r.mountOver(tree, target); err != nil {
		return fmt.Errorf("mount at %s: %w", name, err)
	}
	return nil
}
