// Package atomicfile replaces files so that a reader sees the old content or the new, whole and readable, and never
// anything between, also after a power cut.
package atomicfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Write replaces the file at path with data and mode. The temporary file is in path's directory (watchers of CDI
// directories do not notice files renamed in from elsewhere), has its final mode before it gets its name, and begins
// with a dot, so that nobody takes it for a spec. On an error nothing has changed and nothing is left behind.
func Write(path string, data []byte, mode os.FileMode) error {
	return write(path, data, func(f *os.File) error { return f.Chmod(mode) })
}

// WriteLike is Write with the mode and owner of the file that info is of.
func WriteLike(path string, data []byte, info os.FileInfo) error {
	return write(path, data, func(f *os.File) error {
		// Only root can give files away; to keep one's own no right is needed.
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			if err := f.Chown(int(stat.Uid), int(stat.Gid)); err != nil {
				return err
			}
		}
		return f.Chmod(info.Mode().Perm())
	})
}

func write(path string, data []byte, dress func(*os.File) error) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, errors.Join(err, f.Close(), os.Remove(f.Name())))
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := dress(f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	// The file has its name; what can fail from here on does not undo that, so it is not an error of the write.
	_ = f.Close()
	if d, err := os.Open(dir); err == nil {
		_ = d.Sync()
		_ = d.Close()
	}
	return nil
}
