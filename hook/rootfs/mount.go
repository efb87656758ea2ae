package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/fileio"

	"golang.org/x/sys/unix"
)

const mountAttrs = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC

// MountFile mounts a read-only file with that content and mode over the file at `name`, after following links. The new
// file is the only one on its own tmpfs, so nothing in the root changes. MountFile refuses a directory, and refuses a
// file on a shared mount with [ErrShared]. If a file with that content is mounted there already, it does nothing.
//
// The process must be in the container's mount namespace. The call needs Linux 5.8, and 5.12 for a read-only mount.
func (r *Root) MountFile(name string, data []byte, mode fs.FileMode) error {
	if now, err := r.ReadCover(name, int64(len(data))); err == nil && bytes.Equal(now, data) {
		return nil
	}
	if err := r.mountFile(name, data, mode); err != nil {
		return fmt.Errorf("mount over %s: %w", name, err)
	}
	return nil
}

func (r *Root) mountFile(name string, data []byte, mode fs.FileMode) error {
	target, err := r.open(name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer closeQuietly(target)
	info, err := target.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		return fmt.Errorf("%w but %s", ErrNotRegular, fileio.TypeName(info.Mode()))
	}
	if !strings.HasPrefix(name, "/proc/") {
		if err := refuseProc(target); err != nil {
			return err
		}
	}
	return r.mountAlone(target, len(data), 0, func(tmpfs *os.File, name string) error {
		return create(tmpfs, name, data, mode)
	})
}

// mountAlone mounts a read-only file over target. The function mk creates the file on a tmpfs of its own. The
// attributes in `without` are not set on the mount.
func (r *Root) mountAlone(target *os.File, size int, without uint64, mk func(tmpfs *os.File, name string) error) error {
	tmpfs, err := newTmpfs(size, mountAttrs&^without)
	if err != nil {
		return fmt.Errorf("make a tmpfs: %w", err)
	}
	defer closeQuietly(tmpfs)
	const fileName = "file"
	if err := mk(tmpfs, fileName); err != nil {
		return fmt.Errorf("write to a tmpfs: %w", err)
	}
	copyLabel(target, tmpfs, fileName)
	tree, err := unix.OpenTree(int(tmpfs.Fd()), fileName, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.15
		tree, err = r.openAttached(tmpfs, fileName)
	}
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	file := os.NewFile(uintptr(tree), fileName)
	defer closeQuietly(file)
	return r.attach(file, target, mountAttrs&^without)
}

// refuseProc returns an error if a link of the image led into /proc. The runtime later writes to files there, for
// example to set the container's security profile (CVE-2019-16884).
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

// copyLabel gives a new file the SELinux label of the file that it will cover, since the container may not be allowed
// to read files with a tmpfs's label. Errors are ignored: without SELinux there is no label, and if a label cannot be
// set, the policy's default stays.
func copyLabel(from, dir *os.File, name string) {
	const label, maxLabel = "security.selinux", 4096
	data := make([]byte, maxLabel)
	n, err := unix.Getxattr(fdPath(from), label, data)
	if err == nil && n > 0 {
		_ = unix.Setxattr(fdPath(dir)+"/"+name, label, data[:n], 0)
	}
}

func fdPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// newTmpfs returns a handle of a new, unmounted tmpfs with room for one file of that size.
func newTmpfs(size int, attrs uint64) (*os.File, error) {
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
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, int(attrs))
	if err != nil {
		return nil, fmt.Errorf("fsmount: %w", err)
	}
	return os.NewFile(uintptr(fd), "tmpfs"), nil
}

// openAttached opens the file on the tmpfs like open_tree, for kernels that can clone only mounts of the process's own
// namespace. It mounts the tmpfs over the root for a moment. Nobody sees that mount: paths are looked up from the
// root's handle, which is below it, and the container does not run yet.
func (r *Root) openAttached(tmpfs *os.File, name string) (_ int, err error) {
	if err := r.moveMount(tmpfs, r.dir); err != nil {
		return -1, err
	}
	defer func() {
		if e := unix.Unmount(fdPath(tmpfs), unix.MNT_DETACH); e != nil {
			err = errors.Join(err, fmt.Errorf("unmount the tmpfs: %w", e))
		}
	}()
	return unix.OpenTree(int(tmpfs.Fd()), name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
}

// attach mounts the detached file over target. It makes the mount read-only before it is visible.
func (r *Root) attach(file, target *os.File, attrs uint64) error {
	attr := &unix.MountAttr{Attr_set: attrs | unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE}
	err := unix.MountSetattr(int(file.Fd()), "", unix.AT_EMPTY_PATH, attr)
	if err != nil && !errors.Is(err, unix.ENOSYS) { // before Linux 5.12
		return fmt.Errorf("mount_setattr: %w", err)
	}
	return r.mountOver(file, target)
}

// mountOver mounts a detached file or tree over to, and remembers it for Undo.
func (r *Root) mountOver(from, to *os.File) error {
	if err := r.moveMount(from, to); err != nil {
		return err
	}
	return r.record("the mount at "+to.Name(), from, "", false)
}

func (r *Root) moveMount(from, to *os.File) error {
	if err := r.refuseShared(to); err != nil {
		return err
	}
	const flags = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(int(from.Fd()), "", int(to.Fd()), "", flags); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// refuseShared returns ErrShared if a mount over f would propagate to other mount namespaces. If the image leads to a
// volume with mount propagation, the mount would appear on the host.
func (r *Root) refuseShared(f *os.File) error {
	id, err := mountID(f)
	if err != nil {
		return err
	}
	// Reading the table takes a millisecond on a host with 1,000 mounts, so it is read once. No other process mounts
	// here meanwhile: the container does not run yet.
	shared, known := r.shared[id]
	if !known {
		if err := r.readMounts(); err != nil {
			return err
		}
		if shared, known = r.shared[id]; !known {
			return errors.New("the mount that the file is on is not in mountinfo")
		}
	}
	if shared {
		return ErrShared
	}
	return nil
}

// readMounts reads which mounts of the mount namespace have propagation.
func (r *Root) readMounts() error {
	mounts, err := ownMounts()
	if err != nil {
		return err
	}
	r.shared = map[uint64]bool{}
	for _, m := range mounts {
		r.shared[m.ID] = m.Shared
	}
	return nil
}
