// Package atomicfile replaces files so that a reader sees the old content or the new, whole and readable, and never
// anything between, also after a power cut.
//
// A directory is opened once, and everything happens on that handle: who owns a directory above it cannot lead a write
// elsewhere while it goes on. Nor by a symbolic link, which is followed only where nobody else could have put it (see
// internal/trust).
package atomicfile

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/trust"
)

// Write replaces the file at path with data and mode. The temporary file is in path's directory (watchers of CDI
// directories do not notice files renamed in from elsewhere), has its final mode before it gets its name, and begins
// with a dot, so that nobody takes it for a spec. On an error nothing has changed and nothing is left behind. What a
// process left that was killed while it wrote the same file, the next write removes after an hour.
func Write(path string, data []byte, mode os.FileMode) error {
	dir, err := trust.OpenDir(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer dir.Close()
	return write(dir, filepath.Base(path), data, func(f *os.File) error { return f.Chmod(mode) })
}

// WriteLike is Write for the file of that name in an open directory, with the mode and owner of the file that info is of.
func WriteLike(dir *os.File, name string, data []byte, info os.FileInfo) error {
	return write(dir, name, data, func(f *os.File) error {
		// Only root can give files away; to keep one's own no right is needed.
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			if err := f.Chown(int(stat.Uid), int(stat.Gid)); err != nil {
				return err
			}
		}
		return f.Chmod(info.Mode().Perm())
	})
}

// Remove removes a file that is no directory. If it is not there the error wraps fs.ErrNotExist.
func Remove(path string) error {
	dir, err := trust.OpenDir(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	defer dir.Close()
	return remove(dir, filepath.Base(path))
}

func write(dir *os.File, name string, data []byte, dress func(*os.File) error) error {
	path := filepath.Join(dir.Name(), name)
	removeStale(dir, name)
	f, err := create(dir, temporary(name))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer f.Close()
	temp := filepath.Base(f.Name())
	if err := fill(f, data, dress); err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, remove(dir, temp)))
	}
	if err := unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), name); err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, remove(dir, temp)))
	}
	// The file has its name; that this may not outlive a power cut does not undo it, so it is no error of the write.
	_ = dir.Sync()
	return nil
}

func fill(f *os.File, data []byte, dress func(*os.File) error) error {
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := dress(f); err != nil {
		return err
	}
	return f.Sync()
}

// Temporary files have names of their own: .NAME.RANDOM.tmp.
const (
	temporarySuffix = ".tmp"
	// staleAge is how old one is that nobody writes any more; a write takes milliseconds.
	staleAge = time.Hour
	// mostEntries is how many files of a directory are looked through: it may be another user's, and endless.
	mostEntries = 10_000
)

func temporary(name string) string { return "." + name + "." + rand.Text()[:10] + temporarySuffix }

// removeStale removes the temporary files of a name that a killed process left. What cannot be removed does no harm.
func removeStale(dir *os.File, name string) {
	list, err := dir.ReadDir(mostEntries)
	if err != nil && !errors.Is(err, io.EOF) {
		return
	}
	for _, e := range list {
		if !strings.HasPrefix(e.Name(), "."+name+".") || !strings.HasSuffix(e.Name(), temporarySuffix) {
			continue
		}
		var st unix.Stat_t
		err := unix.Fstatat(int(dir.Fd()), e.Name(), &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && time.Since(time.Unix(st.Mtim.Unix())) > staleAge {
			_ = remove(dir, e.Name())
		}
	}
}

// create makes a new file that only its owner can read.
func create(dir *os.File, name string) (*os.File, error) {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(int(dir.Fd()), name, flags, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "create", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir.Name(), name)), nil
}

func remove(dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, 0); err != nil {
		return &fs.PathError{Op: "remove", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	return nil
}
