// Package rootfs accesses files in the root of an untrusted container. All other code of the hook uses it to open,
// create, replace and cover such files.
//
// The root is opened once. The kernel resolves every path from that handle as if the root were "/" (openat2 with
// RESOLVE_IN_ROOT, or pathrs-lite before Linux 5.6). So no link, no "..", no magic link of /proc and no concurrent
// rename leads out of the root. A file is first opened with O_PATH, which has no effect on devices and FIFOs, and is
// read only if it is regular. A file is replaced by renaming a new one over it, so that nothing is written through a
// link or into an inode that the image chose.
//
// Only files on the root's own mount are read or written, whatever path leads to them. Files on other mounts are
// refused with [ErrVolume]: a link of the image may lead to a volume, a Secret, or a file of /proc or /sys that the
// container's user cannot read, and the hook would copy the content to a file that every user can read. The exception
// is the container's own /dev, whose directories may be listed and written to. A mount that would propagate out of the
// container is refused with [ErrShared].
package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/trust"
)

var (
	// ErrNotRegular means that a file to be read is not a regular file.
	ErrNotRegular = errors.New("not a regular file")
	// ErrVolume means that a file to be read or changed is not on the root's own mount, for example on a volume.
	ErrVolume = errors.New("on another mount than the container's root")
	// ErrShared means that a file to be mounted over is on a mount with propagation.
	ErrShared = errors.New("on a shared mount: the new mount would appear on the host too")
)

// Root is a container's root. Its methods take absolute, clean paths as the container sees them.
type Root struct {
	dir *os.File
	// mount is the ID of the root's own mount, dev that of the container's own /dev, or mount if the container has
	// none.
	mount, dev uint64
	// onHost reports whether the host has mounted a file system, by its device number. If it is nil, only the file
	// systems of `mount` and `dev` are the container's own.
	onHost func(dev uint64) bool
	// shared says which mounts have propagation, by mount ID. It is read when first used, and again if a mount is not
	// in it.
	shared map[uint64]bool
	// undo has the changes that Undo reverts; it is nil before Record.
	undo []change
}

// TreatTmpfsAsOwn makes Root treat a tmpfs as the container's own if the host does not have it mounted: the runtime
// made it for this container, for example at /run. A volume in memory is also mounted on the host, so it does not
// count as the container's own, not even at /dev.
func (r *Root) TreatTmpfsAsOwn(onHost func(dev uint64) bool) {
	r.onHost = onHost
	r.dev = r.mount
}

// Open opens the root at an absolute path, or the working directory, ".". It refuses the root of the calling process.
// hostDev is the path of the host's /dev, which is never treated as the container's own.
//
// Symbolic links in the path are followed only if no user except root and the caller could have made them. Otherwise
// the owner of a directory above the root could lead the hook to another container, or to any mount of the host.
func Open(name, hostDev string) (*Root, error) {
	var dir *os.File
	var err error
	switch {
	case name == ".": // its path may lead elsewhere by now
		dir, err = os.OpenFile(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	case path.IsAbs(name):
		dir, err = trust.OpenDirPath(name)
	default:
		err = fmt.Errorf("open %q: not an absolute path", name)
	}
	if err != nil {
		return nil, err
	}
	r := &Root{dir: dir}
	if r.mount, err = mountID(dir); err != nil {
		_ = dir.Close()
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	if err := refuseOwnRoot(dir); err != nil {
		_ = dir.Close()
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	r.dev = r.findDev(hostDev)
	return r, nil
}

// findDev returns the ID of the mount at /dev if that is the container's own: a tmpfs, as runtimes mount it, that is
// neither the host's nor behind a link. Otherwise it returns the ID of the root's mount.
func (r *Root) findDev(hostDev string) uint64 {
	var host, own unix.Stat_t
	var fs unix.Statfs_t
	dev, err := r.open("/dev", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return r.mount
	}
	defer closeQuietly(dev)
	id, err := mountID(dev)
	err = errors.Join(err, unix.Stat(hostDev, &host), unix.Fstat(int(dev.Fd()), &own), unix.Fstatfs(int(dev.Fd()), &fs))
	if err != nil || own.Dev == host.Dev || fs.Type != unix.TMPFS_MAGIC {
		return r.mount
	}
	return id
}

// refuseOwnRoot returns an error if dir is the host's root.
func refuseOwnRoot(dir *os.File) error {
	var own, other unix.Stat_t
	if err := unix.Stat("/", &own); err != nil {
		return &os.PathError{Op: "stat", Path: "/", Err: err}
	}
	if err := unix.Fstat(int(dir.Fd()), &other); err != nil {
		return err
	}
	if own.Dev == other.Dev && own.Ino == other.Ino {
		return errors.New("it is the root of the host")
	}
	return nil
}

// Close closes the root's handle and the handles for Undo.
func (r *Root) Close() error {
	r.forget()
	return r.dir.Close()
}

// lookupTries is how often a lookup is tried that concurrent renames or mounts disturb.
const lookupTries = 128

// open opens a path in the root. With O_PATH, opening a device or a FIFO has no effect on it.
func (r *Root) open(name string, flags uint64) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	}
	var err error
	for range lookupTries {
		var fd int
		fd, err = unix.Openat2(int(r.dir.Fd()), name, &how)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), name), nil
		case errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM):
			return r.openWithoutOpenat2(name, flags)
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return nil, &os.PathError{Op: "open", Path: name, Err: err}
}

// openWithoutOpenat2 does what open does, if the kernel is older than Linux 5.6 or a seccomp filter refuses openat2.
func (r *Root) openWithoutOpenat2(name string, flags uint64) (*os.File, error) {
	if flags&unix.O_NOFOLLOW != 0 {
		dir, err := r.openWithoutOpenat2(path.Dir(name), unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return nil, err
		}
		defer closeQuietly(dir)
		return openat(dir, path.Base(name), int(flags))
	}
	f, err := pathrs.OpenatInRoot(r.dir, name)
	if err != nil {
		return nil, err
	}
	if flags == unix.O_PATH {
		return f, nil
	}
	defer closeQuietly(f)
	return pathrs.Reopen(f, int(flags))
}

// openat opens a single name in a directory.
func openat(dir *os.File, name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "openat", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func closeQuietly(f *os.File) { _ = f.Close() }
