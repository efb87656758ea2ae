package trust

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks is how many symbolic links the kernel allows in a path.
const maxLinks = 40

// walk is a position on a path.
type walk struct {
	fd   int    // of the current file, opened with O_PATH
	path string // of the current file, without links
	kind uint32 // of the current file: S_IFDIR and so on
	// owner is the user whose files are safe besides root's.
	owner int
	// unsafe says why other users could change the files after the current one, or is nil.
	unsafe error
	// shared says why other users could create names in the current directory, or is nil. It is set for sticky
	// directories, and only by strict walks.
	shared error
	// strict makes the walk return unsafe and shared as errors at once. Other walks return unsafe only at a symbolic
	// link.
	strict bool
}

// follow walks along a path. It opens each file from the directory that the file is in. Files of root and of owner are
// safe. The caller closes the walk.
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

// begin moves the walk to the root directory.
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

// step moves the walk to a file in the current directory. If the file is a symbolic link, step returns the link's
// target, and the walk stays where it is.
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
	reason := w.unsafe
	if reason == nil {
		reason = w.foreign(path, st)
	}
	if reason != nil {
		return "", fmt.Errorf("the symbolic link %s is not followed, since %w: %w", path, ErrUnsafe, reason)
	}
	return readlink(fd, path)
}

// enter moves the walk to an open file.
//
// In a sticky directory other users can create names, but cannot rename or remove root's files. So an existing
// directory of root was created by root and stays. A file or a link of root is not safe there: another user can have
// made or moved it there as a hard link.
func (w *walk) enter(fd int, path string, st unix.Stat_t) error {
	w.close()
	w.fd, w.path, w.kind, w.shared = fd, path, st.Mode&unix.S_IFMT, nil
	sticky := w.kind == unix.S_IFDIR && st.Mode&unix.S_ISVTX != 0
	reason := w.foreign(path, st)
	switch {
	case reason != nil:
	case !sticky:
		reason = writable(path, st)
	case w.strict:
		w.shared = writable(path, st)
	}
	if w.unsafe == nil {
		w.unsafe = reason
	}
	if w.strict && w.unsafe != nil {
		return fmt.Errorf("%w: %w", ErrUnsafe, w.unsafe)
	}
	return nil
}

// foreign returns an error if a file belongs neither to root nor to w.owner.
func (w *walk) foreign(path string, st unix.Stat_t) error {
	if st.Uid == 0 || int(st.Uid) == w.owner || st.Uid == OverflowID && WithoutRoot() {
		return nil
	}
	return fmt.Errorf("%s belongs to user %d", path, st.Uid)
}

// writable returns an error if other users can write to a file. A link is never writable.
func writable(path string, st unix.Stat_t) error {
	switch {
	case st.Mode&0o002 != 0:
		return fmt.Errorf("every user can write to %s", path)
	case st.Mode&0o020 != 0:
		return fmt.Errorf("group %d can write to %s", st.Gid, path)
	}
	return nil
}

// stat returns the status of an open file; after an error it closes the file.
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
