package rootfs

import (
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

// OpenFile opens a regular file for reading, after following links.
func (r *Root) OpenFile(name string) (*os.File, error) {
	f, err := r.open(name, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(f)
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

// ReadFile reads a regular file of at most limit bytes, after following links.
func (r *Root) ReadFile(name string, limit int64) ([]byte, error) {
	f, err := r.OpenFile(name)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(f)
	i, err := info(f)
	if err != nil {
		return nil, err
	}
	if i.Size > limit {
		return nil, fmt.Errorf("read %s: %w: %d bytes, the limit is %d", name, ErrTooLarge, i.Size, limit)
	}
	data := make([]byte, i.Size)
	n, err := io.ReadFull(f, data)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return data[:n], nil
}

// ReadDir lists at most limit names of a directory, in the file system's order.
func (r *Root) ReadDir(name string, limit int) ([]string, error) {
	d, err := r.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(d)
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
