package sim

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// entry is a file to create: a regular file, directory, symlink, device node or socket, by the type bits of mode.
type entry struct {
	mode         fs.FileMode
	data         []byte // of a regular file
	target       string // of a symlink
	major, minor uint32 // of a device node
	gid          int
}

// plan has the files to create, by path relative to a root. Missing directories above them are created too.
type plan map[string]entry

func (p plan) file(path, text string) { p[path] = entry{mode: 0o644, data: []byte(text)} }

func (p plan) program(path string, data []byte) { p[path] = entry{mode: 0o755, data: data} }

func (p plan) link(path, target string) {
	p[path] = entry{mode: fs.ModeSymlink | 0o777, target: target}
}

func (p plan) dir(path string) { p[path] = entry{mode: fs.ModeDir | 0o755} }

func (p plan) socket(path string) { p[path] = entry{mode: fs.ModeSocket | 0o666} }

func (p plan) node(path string, major, minor uint32, mode fs.FileMode) {
	p[path] = entry{mode: fs.ModeDevice | fs.ModeCharDevice | mode, major: major, minor: minor}
}

// writer creates the files of plans.
type writer struct {
	root string
	// plainNodes creates regular files instead of device nodes.
	plainNodes bool
	made       map[string]bool // directories
}

func (w *writer) write(p plan) error {
	w.made = map[string]bool{}
	for _, path := range slices.Sorted(maps.Keys(p)) {
		if err := w.writeEntry(path, p[path]); err != nil {
			return fmt.Errorf("make %s: %w", path, err)
		}
	}
	return nil
}

func (w *writer) writeEntry(rel string, e entry) error {
	if err := w.mkdir(path.Dir(rel)); err != nil {
		return err
	}
	full := filepath.Join(w.root, rel)
	perm := uint32(e.mode.Perm())
	switch e.mode.Type() {
	case fs.ModeDir:
		return w.mkdir(rel)
	case fs.ModeSymlink:
		return os.Symlink(e.target, full)
	case fs.ModeSocket:
		// This creates the same file as bind, without the limit on the length of a socket's path.
		if err := unix.Mknod(full, unix.S_IFSOCK|perm, 0); err != nil {
			return err
		}
		return os.Chmod(full, e.mode.Perm())
	case fs.ModeDevice | fs.ModeCharDevice:
		return w.node(full, e)
	default:
		return writeFile(full, e.data, e.mode.Perm())
	}
}

func (w *writer) mkdir(rel string) error {
	if w.made[rel] {
		return nil
	}
	w.made[rel] = true
	return os.MkdirAll(filepath.Join(w.root, rel), 0o755)
}

func (w *writer) node(full string, e entry) error {
	if w.plainNodes {
		return writeFile(full, nil, 0o666)
	}
	err := unix.Mknod(full, unix.S_IFCHR|uint32(e.mode.Perm()), int(unix.Mkdev(e.major, e.minor)))
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: device %d:%d: %w", ErrNoDeviceNodes, e.major, e.minor, err)
	}
	if err != nil {
		return err
	}
	if e.gid != 0 {
		if err := os.Chown(full, 0, e.gid); err != nil {
			return err
		}
	}
	return os.Chmod(full, e.mode.Perm()) // whatever the umask
}

// writeFile creates a file whose mode does not depend on the umask. No process is started while the file is open: it
// would inherit the open file until it runs its own program, and the kernel runs no program that is open for writing.
func writeFile(full string, data []byte, perm fs.FileMode) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f, err := os.OpenFile(full, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Chmod(perm), f.Close())
}

// libArch returns an architecture's name in Debian's library directories and in file names.
func libArch(goarch string) string {
	if goarch == "arm64" {
		return "aarch64"
	}
	return "x86_64"
}

// isPlainPath reports whether a path is relative, clean, and without ".." or white space.
func isPlainPath(rel string) bool {
	return filepath.IsLocal(rel) && path.Clean(rel) == rel && rel != "." && !strings.ContainsAny(rel, "\x00 \n")
}
