package trust

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks is how many symbolic links a path may have, as for the kernel.
const maxLinks = 40

// walk is where a path has led so far.
type walk struct {
	fd   int    // of the last file, opened with O_PATH
	path string // of the last file, without links
	kind uint32 // of the last file: S_IFDIR and so on
	// owner is the user besides root whose files are safe.
	owner int
	// unsafe is why somebody else could change what comes next, or nil.
	unsafe error
	// shared is why others could make names in the directory that the walk is at, if that is a sticky one and the walk is
	// strict, or nil.
	shared error
	// strict makes that an error at once. Without it, it is one for symbolic links alone.
	strict bool
}

// follow goes along a path, file by file, each opened in the directory before. The caller closes the walk.
// Files of root and of owner are safe.
func follow(path string, owner int, strict bool) (*walk, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	w := &walk{fd: -1, owner: owner, strict: strict}
	if err := w.along(abs); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *walk) close() { _ = unix.Close(w.fd) }

func (w *walk) along(path string) error {
	if err := w.begin(); err != nil {
		return err
	}
	links := 0
	for names := split(path); len(names) > 0; {
		target, err := w.step(names[0])
		if err != nil {
			return err
		}
		names = names[1:]
		if target == "" {
			continue
		}
		if links++; links > maxLinks {
			return &os.PathError{Op: "open", Path: path, Err: unix.ELOOP}
		}
		if filepath.IsAbs(target) {
			if err := w.begin(); err != nil {
				return err
			}
		}
		names = append(split(target), names...)
	}
	if w.shared != nil {
		return fmt.Errorf("%w: %w", ErrUnsafe, w.shared)
	}
	return nil
}

func split(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// begin goes to the root directory.
func (w *walk) begin() error {
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/", Err: err}
	}
	st, err := stat(fd, "/")
	if err != nil {
		return err
	}
	return w.enter(fd, "/", st)
}

// step goes to a file in the directory that the walk is at. At a symbolic link it stays where it is and returns what the
// link contains.
func (w *walk) step(name string) (target string, err error) {
	path := filepath.Join(w.path, name)
	fd, err := unix.Openat(w.fd, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil && w.shared != nil {
		return "", fmt.Errorf("%w: %w", ErrUnsafe, w.shared)
	}
	if err != nil {
		return "", &os.PathError{Op: "open", Path: path, Err: err}
	}
	st, err := stat(fd, path)
	if err != nil {
		return "", err
	}
	if w.shared != nil && (st.Mode&unix.S_IFMT != unix.S_IFDIR || w.foreign(path, st) != nil) {
		_ = unix.Close(fd)
		return "", fmt.Errorf("%w: %w", ErrUnsafe, w.shared)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", w.enter(fd, path, st)
	}
	defer unix.Close(fd)
	why := w.unsafe
	if why == nil {
		why = w.foreign(path, st)
	}
	if why != nil {
		return "", fmt.Errorf("the symbolic link %s is not followed, since %w: %w", path, ErrUnsafe, why)
	}
	return readlink(fd, path)
}

// enter goes to an open file.
//
// In a sticky directory others can make names, and not rename or remove what is not theirs. So a directory of root's that
// is there stays, and nobody else can have moved it there. A file or a link of root's can be a second name that others
// made of it, or one that they moved there.
func (w *walk) enter(fd int, path string, st unix.Stat_t) error {
	w.close()
	w.fd, w.path, w.kind, w.shared = fd, path, st.Mode&unix.S_IFMT, nil
	sticky := w.kind == unix.S_IFDIR && st.Mode&unix.S_ISVTX != 0
	why := w.foreign(path, st)
	switch {
	case why != nil:
	case !sticky:
		why = writable(path, st)
	case w.strict:
		w.shared = writable(path, st)
	}
	if w.unsafe == nil {
		w.unsafe = why
	}
	if w.strict && w.unsafe != nil {
		return fmt.Errorf("%w: %w", ErrUnsafe, w.unsafe)
	}
	return nil
}

// foreign is an error if a file belongs to others, or nil.
func (w *walk) foreign(path string, st unix.Stat_t) error {
	if st.Uid != 0 && int(st.Uid) != w.owner {
		return fmt.Errorf("%s belongs to user %d", path, st.Uid)
	}
	return nil
}

// writable is an error if others can write to a file, which is no link, or nil.
func writable(path string, st unix.Stat_t) error {
	switch {
	case st.Mode&0o002 != 0:
		return fmt.Errorf("every user can write to %s", path)
	case st.Mode&0o020 != 0:
		return fmt.Errorf("group %d can write to %s", st.Gid, path)
	}
	return nil
}

// stat is about an open file, which it closes on an error.
func stat(fd int, path string) (st unix.Stat_t, err error) {
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return st, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st, nil
}

func readlink(fd int, path string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil {
		return "", &os.PathError{Op: "readlink", Path: path, Err: err}
	}
	return string(buf[:n]), nil
}
