package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/trust"
)

// Check says why Write could not write files in the directory, which it makes if it is not there. Nothing else is left.
func Check(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("make the directory %s: %w", path, err)
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

// MakeDir makes a directory that everybody can read, whatever the umask, in one that is there. One of that name may be
// there already, and stays as it is.
func MakeDir(path string) error {
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
		return &fs.PathError{Op: "mkdir", Path: path, Err: err}
	}
	// A chmod by the path could be led to another directory, which is then open to everybody.
	fd, err := unix.Openat(int(parent.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Fchmod(fd, 0o755); err != nil {
		return &fs.PathError{Op: "chmod", Path: path, Err: err}
	}
	return nil
}
