// Package rootfs works on files in a container's root that somebody else filled. It is the only place of the hook that
// opens, makes, replaces or mounts over such files.
//
// Every path is resolved by the kernel as if the root were "/" (openat2 with RESOLVE_IN_ROOT; pathrs-lite on kernels
// before 5.6), from one handle that is opened once. So no link, no "..", no magic link of /proc and no rename during
// the work leads out of the root. Files are first opened with O_PATH, which has no effect on a device or a FIFO, and
// read only if they are regular. A file is replaced by creating a new one beside it and renaming, so nothing is ever
// written through a link or into an inode that the image chose.
//
// Only what is on the root's own mount is read or written, whatever path led there: a link of the image may lead to a
// volume, a Secret or a file of /proc or /sys that the container's user cannot read, and what the hook read there would
// end in a file that everybody can read. Other files are refused with [ErrVolume]. The container's own /dev is the
// exception: directories on it are listed and written to. Nothing is mounted where the mount would propagate out of the
// container; that is refused with [ErrShared].
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
	// ErrNotRegular is the error of reading something else than a regular file.
	ErrNotRegular = errors.New("not a regular file")
	// ErrTooLarge is the error of reading a file that is larger than the limit.
	ErrTooLarge = errors.New("file too large")
	// ErrVolume is the error of reading or changing what is on a volume, or on any other mount than the root's own.
	ErrVolume = errors.New("on another mount than the container's root")
	// ErrShared is the error of mounting over something on a mount that others share.
	ErrShared = errors.New("on a mount with propagation, where others would see it")
)

// Root is a container's root. Its methods take absolute, clean paths as the container sees them.
type Root struct {
	dir *os.File
	// mount is the id of the root's own mount, dev that of the container's own /dev, or the same if it has none.
	mount, dev uint64
}

// Open opens the root at path, or the working directory, ".". hostDev is the host's /dev, which is never taken for the
// container's own. It refuses the root of the calling process.
//
// On the way no symbolic link is followed that somebody else than root, or the caller, could have made: the owner of a
// directory above the root could lead the hook to another container's, or to any mount of the host.
func Open(name, hostDev string) (*Root, error) {
	dir, err := openRoot(name)
	if err != nil {
		return nil, err
	}
	r := &Root{dir: dir}
	if r.mount, err = mountID(dir); err == nil {
		err = refuseOwnRoot(dir)
	}
	if err != nil {
		_ = dir.Close()
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	r.dev = r.findDev(hostDev)
	return r, nil
}

func openRoot(name string) (*os.File, error) {
	switch {
	case name == ".": // its path may lead elsewhere by now
		return os.OpenFile(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	case !path.IsAbs(name):
		return nil, fmt.Errorf("open %q: not an absolute path", name)
	}
	return trust.OpenDirPath(name)
}

// findDev is the id of the mount at /dev, not behind a link there, if it is a tmpfs, as runtimes mount it, and not the
// host's; otherwise that of the root's own mount.
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

// refuseOwnRoot guards against working on the host's files, whatever led there.
func refuseOwnRoot(dir *os.File) error {
	var own, other unix.Stat_t
	if err := unix.Stat("/", &own); err != nil {
		return fmt.Errorf("look at /: %w", err)
	}
	if err := unix.Fstat(int(dir.Fd()), &other); err != nil {
		return err
	}
	if own.Dev == other.Dev && own.Ino == other.Ino {
		return errors.New("it is the root of the host")
	}
	return nil
}

// Close closes the root's handle.
func (r *Root) Close() error { return r.dir.Close() }

// lookupTries bounds how often a lookup is tried again that a rename or mount elsewhere has disturbed.
const lookupTries = 128

// open opens a path in the root. With flags O_PATH it has no effect on what it opens.
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
			return r.openSlowly(name, flags)
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return nil, &os.PathError{Op: "open", Path: name, Err: err}
}

// openSlowly is open where there is no openat2: before Linux 5.6, or refused by a seccomp filter.
func (r *Root) openSlowly(name string, flags uint64) (*os.File, error) {
	if flags&unix.O_NOFOLLOW != 0 {
		dir, err := r.openSlowly(path.Dir(name), unix.O_PATH|unix.O_DIRECTORY)
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
