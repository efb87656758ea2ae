package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// Node describes a device node.
type Node struct {
	// Mode has the type, S_IFCHR or S_IFBLK, and the permissions.
	Mode uint32
	// Device has the device numbers, as unix.Mkdev combines them.
	Device uint64
	// UID and GID are the owners as the host sees them.
	UID, GID int
}

// HasNode reports whether a path is a device node with the type and numbers of n. It does not follow a link. On the
// root's own mount and in the container's own /dev, the permissions and owners must match too; on a volume they may
// differ.
func (r *Root) HasNode(name string, n Node) bool {
	f, err := r.open(name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return false
	}
	defer closeQuietly(f)
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return false
	}
	if st.Mode&unix.S_IFMT != n.Mode&unix.S_IFMT || st.Rdev != n.Device {
		return false
	}
	owned := st.Mode == n.Mode && int(st.Uid) == n.UID && int(st.Gid) == n.GID
	return owned || errors.Is(r.checkOwnMount(f), ErrVolume)
}

// CheckNode returns an error if MakeNode cannot make a node at a path. It changes nothing.
func (r *Root) CheckNode(name string) error {
	dir, err := r.checkParent(name)
	if err != nil {
		return err
	}
	defer closeQuietly(dir)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &fs); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	if fs.Flags&unix.ST_NODEV != 0 {
		return fmt.Errorf("%s is mounted with nodev: no device could be opened there", dir.Name())
	}
	info, err := r.Lstat(name)
	if err == nil && info.IsDir() {
		return unix.EISDIR
	}
	return nil
}

// MakeNode creates a device node, and missing directories above it. It replaces a link or another file, but not a
// directory or a mount point.
func (r *Root) MakeNode(name string, n Node) error {
	if err := r.makeNode(name, n); err != nil {
		return fmt.Errorf("make the device node %s: %w", name, err)
	}
	return nil
}

func (r *Root) makeNode(name string, n Node) error {
	dir, err := r.ownDir(path.Dir(name))
	if err != nil {
		return err
	}
	defer closeQuietly(dir)
	old, err := r.replaceKept(dir, path.Base(name), func(temp string) error { return mknod(dir, temp, n) })
	if err != nil {
		return err
	}
	err = r.record("the node "+name, dir, path.Base(name), false)
	if old == "" {
		return err
	}
	if err != nil {
		return errors.Join(err, unix.Renameat(int(dir.Fd()), old, int(dir.Fd()), path.Base(name)))
	}
	r.undo[len(r.undo)-1].old = old
	return nil
}

// mknod creates a device node. If the owners and permissions cannot be set, it removes the node again. Both are set
// through a handle, since the name could lead elsewhere by then.
func mknod(dir *os.File, name string, n Node) error {
	if err := unix.Mknodat(int(dir.Fd()), name, n.Mode&unix.S_IFMT, int(n.Device)); err != nil {
		return err
	}
	f, err := openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return errors.Join(err, unix.Unlinkat(int(dir.Fd()), name, 0))
	}
	defer closeQuietly(f)
	if err := own(f, n); err != nil {
		return errors.Join(err, unix.Unlinkat(int(dir.Fd()), name, 0))
	}
	return nil
}

func own(f *os.File, n Node) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != n.Mode&unix.S_IFMT || st.Rdev != n.Device {
		return errors.New("it was replaced while it was made")
	}
	if err := unix.Fchownat(int(f.Fd()), "", n.UID, n.GID, unix.AT_EMPTY_PATH); err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	if err := unix.Chmod(fdPath(f), n.Mode&^unix.S_IFMT); err != nil {
		return fmt.Errorf("chmod: %w", err)
	}
	return nil
}

// MountNode mounts a device node over the file at name. The node is on a tmpfs of its own in the host's user namespace,
// since the kernel opens no device on a file system of another user namespace.
func (r *Root) MountNode(name string, n Node) error {
	target, err := r.open(name, unix.O_PATH)
	if err != nil {
		return fmt.Errorf("mount the node %s: %w", name, err)
	}
	defer closeQuietly(target)
	if err := refuseProc(target); err != nil { // the file may have been replaced since CheckMountPoint
		return fmt.Errorf("mount the node %s: %w", name, err)
	}
	err = r.mountAlone(target, 0, unix.MOUNT_ATTR_NODEV, func(tmpfs *os.File, name string) error {
		return mknod(tmpfs, name, n)
	})
	if err != nil {
		return fmt.Errorf("mount the node %s: %w", name, err)
	}
	return nil
}
