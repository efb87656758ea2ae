package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"
)

// Info is what Stat tells about a file.
type Info struct {
	// Mode is the type and the permission bits.
	Mode fs.FileMode
	// Size is in bytes.
	Size int64
	// Minor is a device's minor number.
	Minor uint32
}

// Stat describes what is at a path, after following links.
func (r *Root) Stat(name string) (Info, error) { return r.stat(name, unix.O_PATH) }

// Lstat describes what is at a path, without following a link there.
func (r *Root) Lstat(name string) (Info, error) { return r.stat(name, unix.O_PATH|unix.O_NOFOLLOW) }

func (r *Root) stat(name string, flags uint64) (Info, error) {
	f, err := r.open(name, flags)
	if err != nil {
		return Info{}, err
	}
	defer closeQuietly(f)
	return info(f)
}

func info(f *os.File) (Info, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Info{}, &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	mode := fs.FileMode(st.Mode & 0o777)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFCHR:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		mode |= fs.ModeDevice
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	default:
		mode |= fs.ModeIrregular
	}
	return Info{Mode: mode, Size: st.Size, Minor: unix.Minor(st.Rdev)}, nil
}

// IsFile reports whether there is a regular file with content at a path, after following links. The empty files that
// runtimes make as mount points are none.
func (r *Root) IsFile(name string) bool {
	i, err := r.Stat(name)
	return err == nil && i.Mode.IsRegular() && i.Size > 0
}

// OpenFile opens a regular file on the root's own mount for reading, after following links.
func (r *Root) OpenFile(name string) (*os.File, error) { return r.openFile(name, r.checkMount) }

// ReadFile reads a regular file of at most limit bytes on the root's own mount, after following links.
func (r *Root) ReadFile(name string, limit int64) ([]byte, error) {
	return r.readFile(name, limit, r.checkMount)
}

// ReadCover reads a regular file of at most limit bytes that is mounted over another one and is on a tmpfs, as
// MountFile mounts them. It need not be one of MountFile's: its content may be compared, but must not be written.
func (r *Root) ReadCover(name string, limit int64) ([]byte, error) {
	return r.readFile(name, limit, checkCover)
}

// openFile opens a regular file that check admits. Nothing but the root decides what is at a path: check gets the file.
func (r *Root) openFile(name string, check func(*os.File) error) (*os.File, error) {
	f, err := r.open(name, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(f)
	if err := check(f); err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	return openRegular(f, name)
}

func (r *Root) readFile(name string, limit int64, check func(*os.File) error) ([]byte, error) {
	f, err := r.openFile(name, check)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(f)
	return readAll(f, name, limit)
}

// checkMount returns ErrVolume for what is not on the root's own mount.
func (r *Root) checkMount(f *os.File) error {
	id, err := mountID(f)
	if err == nil && id != r.mount {
		err = ErrVolume
	}
	return err
}

func checkCover(f *os.File) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_TYPE, &st); err != nil {
		return fmt.Errorf("statx: %w", err)
	}
	if fs.Type != unix.TMPFS_MAGIC || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return errors.New("not a file of a tmpfs that is mounted there")
	}
	return nil
}

// ReadHostFile reads a regular file of the host that has at most limit bytes. It follows no link at the path's end, and
// does not wait.
func ReadHostFile(name string, limit int64) ([]byte, error) {
	p, err := os.OpenFile(name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(p)
	f, err := openRegular(p, name)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(f)
	return readAll(f, name, limit)
}

// openRegular opens for reading what is open with O_PATH, if it is a regular file.
func openRegular(f *os.File, name string) (*os.File, error) {
	i, err := info(f)
	if err != nil {
		return nil, err
	}
	if !i.Mode.IsRegular() {
		return nil, fmt.Errorf("open %s: %w but %s", name, ErrNotRegular, typeName(i.Mode))
	}
	file, err := pathrs.Reopen(f, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	return file, nil
}

// readAll reads at most limit bytes. The file's size is no more than a hint: it is 0 in /proc, and may change.
func readAll(f *os.File, name string, limit int64) ([]byte, error) {
	i, err := info(f)
	if err != nil {
		return nil, err
	}
	var data bytes.Buffer
	if i.Size <= limit {
		data.Grow(int(i.Size) + bytes.MinRead)
		_, err = data.ReadFrom(io.LimitReader(f, limit+1))
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if max(i.Size, int64(data.Len())) > limit {
		return nil, fmt.Errorf("read %s: %w: more than %d bytes", name, ErrTooLarge, limit)
	}
	return data.Bytes(), nil
}

// ReadDir lists at most limit names of a directory on the root's own mount or in the container's own /dev, in the file
// system's order.
func (r *Root) ReadDir(name string, limit int) ([]string, error) {
	d, err := r.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(d)
	if err := r.checkOwn(d); err != nil {
		return nil, fmt.Errorf("list %s: %w", name, err)
	}
	names, err := d.Readdirnames(limit)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("list %s: %w", name, err)
	}
	return names, nil
}

func typeName(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeSymlink != 0:
		return "a symbolic link"
	case mode&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return "of an unknown type"
}
