package rootfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"gpu-cdi-plugin/internal/fileio"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"
)

// Stat returns the FileInfo of the file at a path, after following links.
func (r *Root) Stat(name string) (fs.FileInfo, error) { return r.stat(name, unix.O_PATH) }

// Lstat returns the FileInfo of the file at a path, without following a link there.
func (r *Root) Lstat(name string) (fs.FileInfo, error) {
	return r.stat(name, unix.O_PATH|unix.O_NOFOLLOW)
}

func (r *Root) stat(name string, flags uint64) (fs.FileInfo, error) {
	f, err := r.open(name, flags)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(f)
	return f.Stat()
}

// IsFile reports whether a path leads to a regular file that is not empty. Runtimes create empty files as mount points.
func (r *Root) IsFile(name string) bool {
	info, err := r.Stat(name)
	return err == nil && info.Mode().IsRegular() && info.Size() > 0
}

// OpenFile opens a regular file on the root's own mount for reading, after following links.
func (r *Root) OpenFile(name string) (*os.File, error) { return r.openFile(name, r.checkRootMount) }

// ReadFile reads a regular file of at most limit bytes on the root's own mount, after following links. It refuses a
// file with several names (hard links) that not every user can read: one of the names may be outside the root, and the
// hook writes what it reads for every user.
func (r *Root) ReadFile(name string, limit int64) ([]byte, error) {
	return r.readFile(name, limit, func(f *os.File) error {
		if err := r.checkRootMount(f); err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return err
		}
		if st.Nlink > 1 && st.Mode&0o004 == 0 {
			return fmt.Errorf("it has %d names (hard links), and not every user can read it", st.Nlink)
		}
		return nil
	})
}

// ReadCover reads a regular file of at most limit bytes that is mounted over another file from a tmpfs, like a file of
// MountFile. Engines mount Secrets like that too, so the content may be compared but must not be written.
func (r *Root) ReadCover(name string, limit int64) ([]byte, error) {
	return r.readFile(name, limit, checkCover)
}

// openFile opens a regular file that passes a check. The check gets the open file, since another file may have its
// path by then.
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
	data, _, err := fileio.ReadRegular(f, limit)
	return data, err
}

// checkRootMount returns ErrVolume unless the file is on the root's own mount.
func (r *Root) checkRootMount(f *os.File) error {
	id, err := mountID(f)
	if err != nil {
		return err
	}
	if id != r.mount {
		return ErrVolume
	}
	return nil
}

// checkOwnMount returns ErrVolume unless the file is on the root's own mount, in the container's own /dev, or on
// another tmpfs of the container (TreatTmpfsAsOwn).
func (r *Root) checkOwnMount(f *os.File) error {
	id, err := mountID(f)
	if err != nil {
		return err
	}
	if id != r.mount && id != r.dev && !r.isOwnTmpfs(f) {
		return ErrVolume
	}
	return nil
}

func (r *Root) isOwnTmpfs(f *os.File) bool {
	var fs unix.Statfs_t
	var st unix.Stat_t
	return r.onHost != nil && unix.Fstatfs(int(f.Fd()), &fs) == nil && fs.Type == unix.TMPFS_MAGIC &&
		unix.Fstat(int(f.Fd()), &st) == nil && !r.onHost(st.Dev)
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
		return errors.New("not a file on a tmpfs mounted over another file")
	}
	return nil
}

// ReadHostFile reads a regular file of the host of at most limit bytes. It does not follow a link at the path's end,
// and does not block on a FIFO.
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
	data, _, err := fileio.ReadRegular(f, limit)
	return data, err
}

// openRegular reopens a file that is open with O_PATH for reading. It must be a regular file.
func openRegular(f *os.File, name string) (*os.File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("open %s: %w but %s", name, ErrNotRegular, fileio.TypeName(info.Mode()))
	}
	file, err := pathrs.Reopen(f, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	return file, nil
}

// ReadDir returns at most limit names in a directory on the root's own mount or in the container's own /dev, in the
// file system's order.
func (r *Root) ReadDir(name string, limit int) ([]string, error) {
	d, err := r.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(d)
	if err := r.checkOwnMount(d); err != nil {
		return nil, fmt.Errorf("list %s: %w", name, err)
	}
	names, err := d.Readdirnames(limit)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("list %s: %w", name, err)
	}
	return names, nil
}
