// Package fileio reads, replaces, locks and identifies files of the host.
//
// Replacing is atomic: readers see the complete old or new content, even after a power cut. A directory is opened once
// and used through that handle, so that the owner of a directory above cannot redirect the write. Only regular files
// are read, without blocking: a FIFO or device in place of a file is an error, and so is a file above the caller's
// limit. Only ReadInput also reads pipes and devices, with a time limit. A lock is never stale: the kernel releases it
// when its process has ended, and all processes that inherited the locked file.
package fileio

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

// ErrNotDurable means that readers see the new file, but a power cut may restore the old one.
var ErrNotDurable = errors.New("the directory could not be synced")

// Replace replaces the file at path with data and mode. After an error the old file is unchanged and no temporary file
// is left. If a process was killed, its temporary file stays; writing the same file an hour later or more removes it.
//
// The temporary file is in path's directory, since watchers of CDI directories miss files that are renamed from
// elsewhere. Its name begins with a dot, so that it is not read as a spec.
func Replace(path string, data []byte, mode os.FileMode) error {
	return ignoreNotDurable(WriteDurably(path, data, mode))
}

// WriteDurably does what Replace does, for a file that must survive a power cut: it also returns errors that wrap
// ErrNotDurable. After such an error the new file is in place.
func WriteDurably(path string, data []byte, mode os.FileMode) error {
	dir, err := trust.OpenDir(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer dir.Close()
	return write(dir, filepath.Base(path), data, func(f *os.File) error { return f.Chmod(mode) })
}

// ReplaceLike replaces a file by its name in an open directory. The new file gets the mode and the owner of info.
func ReplaceLike(dir *os.File, name string, data []byte, info os.FileInfo) error {
	return ignoreNotDurable(write(dir, name, data, func(f *os.File) error {
		// Only root can set another owner. Setting the owner to oneself needs no privilege.
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			if err := f.Chown(int(stat.Uid), int(stat.Gid)); err != nil {
				return err
			}
		}
		return f.Chmod(info.Mode().Perm())
	}))
}

// ignoreNotDurable drops ErrNotDurable, since readers see the new file.
func ignoreNotDurable(err error) error {
	if errors.Is(err, ErrNotDurable) {
		return nil
	}
	return err
}

// Remove removes a file that is not a directory. If it does not exist, the error wraps fs.ErrNotExist.
func Remove(path string) error {
	dir, err := trust.OpenDir(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	defer dir.Close()
	return remove(dir, filepath.Base(path))
}

// CheckWritable creates a missing directory, and returns an error if Replace could not write files in it.
func CheckWritable(path string) error {
	if err := MakeDirs(path); err != nil {
		return err
	}
	dir, err := trust.OpenDir(path)
	if err != nil {
		return fmt.Errorf("write in %s: %w", path, err)
	}
	defer dir.Close()
	f, err := create(dir, temporary("check"))
	if err != nil {
		return fmt.Errorf("write in %s: %w", path, err)
	}
	_, err = f.Write([]byte("check"))
	if err := errors.Join(err, f.Close(), remove(dir, filepath.Base(f.Name()))); err != nil {
		return fmt.Errorf("write in %s: %w", path, err)
	}
	return nil
}

// MakeDirs does what MakeDir does, and creates missing parents.
func MakeDirs(path string) error {
	err := MakeDir(path)
	if parent := filepath.Dir(path); errors.Is(err, fs.ErrNotExist) && parent != path {
		if err := MakeDirs(parent); err != nil {
			return err
		}
		err = MakeDir(path)
	}
	return err
}

// MakeDir creates a directory with mode 0755, whatever the umask. Its parent must exist. If a file with the name
// exists, MakeDir does nothing.
func MakeDir(path string) error {
	if err := makeDir(path); err != nil {
		return &fs.PathError{Op: "mkdir", Path: path, Err: err}
	}
	return nil
}

func makeDir(path string) error {
	parent, err := trust.OpenDir(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	name := filepath.Base(path)
	err = unix.Mkdirat(int(parent.Fd()), name, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	// The mode is set through a handle: the parent's owner can replace the new directory by a link, and a chmod by
	// path would open the link's target to every user.
	fd, err := unix.Openat(int(parent.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the new directory: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Fchmod(fd, 0o755); err != nil {
		return fmt.Errorf("set its mode: %w", err)
	}
	return nil
}

// write replaces a file. It calls setMode before it renames the new file.
func write(dir *os.File, name string, data []byte, setMode func(*os.File) error) error {
	path := filepath.Join(dir.Name(), name)
	removeStale(dir, name)
	f, err := create(dir, temporary(name))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer f.Close()
	temp := filepath.Base(f.Name())
	if err := fill(f, data, setMode); err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, remove(dir, temp)))
	}
	if err := unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), name); err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, remove(dir, temp)))
	}
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("write %s: %w: %w", path, ErrNotDurable, err)
	}
	return nil
}

func fill(f *os.File, data []byte, setMode func(*os.File) error) error {
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := setMode(f); err != nil {
		return err
	}
	return f.Sync()
}

const (
	// Temporary files are named .NAME.RANDOM.tmp.
	temporarySuffix = ".tmp"
	// staleAge is the age at which a temporary file is abandoned. A write takes milliseconds.
	staleAge = time.Hour
	// maxEntries limits the search for abandoned files, since another user may own the directory and fill it.
	maxEntries = 10_000
)

func temporary(name string) string { return "." + name + "." + rand.Text()[:10] + temporarySuffix }

// removeStale removes abandoned temporary files of the file `name`. It ignores errors, since these files are harmless.
func removeStale(dir *os.File, name string) {
	entries, err := dir.ReadDir(maxEntries)
	if err != nil && !errors.Is(err, io.EOF) {
		return
	}
	for _, e := range entries {
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

// create creates a file that only its owner can read.
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
