package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const mountAttrs = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC

// MountFile covers what is at name, after following links, with a read-only file of that content and mode; a directory
// is left alone. The new file is the only one of a tmpfs of its own, so nothing in the root changes. The mount
// namespace of the process must be the container's. It needs Linux 5.8, and 5.12 for being read-only. Where such a file
// with that content is mounted already, nothing is done. What is on a shared mount is refused with [ErrShared].
func (r *Root) MountFile(name string, data []byte, mode fs.FileMode) error {
	now, err := r.ReadCover(name, int64(len(data)))
	if err == nil && bytes.Equal(now, data) {
		return nil
	}
	target, err := r.open(name, unix.O_PATH)
	if err != nil {
		return fmt.Errorf("mount over %s: %w", name, err)
	}
	defer closeQuietly(target)
	i, err := info(target)
	if err == nil && i.Mode.IsDir() {
		err = fmt.Errorf("%w but %s", ErrNotRegular, typeName(i.Mode))
	}
	if err == nil && !strings.HasPrefix(name, "/proc/") {
		err = refuseProc(target)
	}
	if err == nil {
		err = r.cover(target, data, mode)
	}
	if err != nil {
		return fmt.Errorf("mount over %s: %w", name, err)
	}
	return nil
}

// refuseProc keeps links of the image away from /proc: the runtime still writes to files there, to set the container's
// security profile for one (see CVE-2019-16884).
func refuseProc(f *os.File) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	if st.Type == unix.PROC_SUPER_MAGIC {
		return errors.New("it leads into /proc")
	}
	return nil
}

func (r *Root) cover(target *os.File, data []byte, mode fs.FileMode) error {
	const name = "file"
	tmpfs, err := newTmpfs(len(data))
	if err != nil {
		return fmt.Errorf("make a tmpfs: %w", err)
	}
	defer closeQuietly(tmpfs)
	if err := create(tmpfs, name, data, mode); err != nil {
		return fmt.Errorf("write to a tmpfs: %w", err)
	}
	copyLabel(target, tmpfs, name)
	tree, err := unix.OpenTree(int(tmpfs.Fd()), name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.15
		tree, err = r.openAttached(tmpfs, name)
	}
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	file := os.NewFile(uintptr(tree), name)
	defer closeQuietly(file)
	return attach(file, target)
}

// copyLabel gives a new file the SELinux label of the file that it will cover. With that of a tmpfs the container may not
// be allowed to read it. Without SELinux there is none; a label that cannot be set leaves the policy's default.
func copyLabel(from, dir *os.File, name string) {
	const label, maxLabel = "security.selinux", 4096
	data := make([]byte, maxLabel)
	n, err := unix.Getxattr(fdPath(from), label, data)
	if err == nil && n > 0 {
		_ = unix.Setxattr(fdPath(dir)+"/"+name, label, data[:n], 0)
	}
}

func fdPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// newTmpfs is a handle on a new tmpfs, mounted nowhere, for one file of that size.
func newTmpfs(size int) (*os.File, error) {
	ctx, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen: %w", err)
	}
	defer func() { _ = unix.Close(ctx) }()
	page := os.Getpagesize()
	size = (size/page + 2) * page
	if err := unix.FsconfigSetString(ctx, "size", strconv.Itoa(size)); err != nil {
		return nil, fmt.Errorf("fsconfig: %w", err)
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return nil, fmt.Errorf("fsconfig: %w", err)
	}
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, mountAttrs)
	if err != nil {
		return nil, fmt.Errorf("fsmount: %w", err)
	}
	return os.NewFile(uintptr(fd), "tmpfs"), nil
}

// openAttached is open_tree for kernels that clone only mounts of the own namespace. The tmpfs lies over the root
// meanwhile, which nobody sees: lookups start below it, at the root's handle, and the container does not run yet.
func (r *Root) openAttached(tmpfs *os.File, name string) (_ int, err error) {
	if err := moveMount(tmpfs, r.dir); err != nil {
		return -1, err
	}
	defer func() {
		if e := unix.Unmount(fdPath(tmpfs), unix.MNT_DETACH); e != nil {
			err = errors.Join(err, fmt.Errorf("unmount the tmpfs: %w", e))
		}
	}()
	return unix.OpenTree(int(tmpfs.Fd()), name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
}

// attach mounts the detached file over target. The mount is read-only before anyone can see it.
func attach(file, target *os.File) error {
	attr := &unix.MountAttr{Attr_set: mountAttrs | unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(int(file.Fd()), "", unix.AT_EMPTY_PATH, attr); err != nil && !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("mount_setattr: %w", err) // ENOSYS: before Linux 5.12
	}
	return moveMount(file, target)
}

func moveMount(from, to *os.File) error {
	if err := refuseShared(to); err != nil {
		return err
	}
	const flags = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(int(from.Fd()), "", int(to.Fd()), "", flags); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// refuseShared returns an error if a mount over f would appear in other mount namespaces too: on the host, where the
// image leads to a volume with mount propagation.
func refuseShared(f *os.File) error {
	id, err := mountID(f)
	if err != nil {
		return err
	}
	mounts, err := ReadHostFile("/proc/thread-self/mountinfo", maxMountinfo)
	if err != nil {
		return err
	}
	mount := findMount(mounts, id)
	if mount == "" {
		return errors.New("the mount below is unknown")
	}
	if optional, _, _ := strings.Cut(mount, " - "); strings.Contains(optional, " shared:") {
		return ErrShared
	}
	return nil
}
