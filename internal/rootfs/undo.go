package rootfs

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Record makes the root remember what is made and mounted from now on, for Undo.
func (r *Root) Record() { r.undo = []change{} }

// change is a name that was made in a directory, or a mount.
type change struct {
	what string
	file *os.File // the directory of the name, or the mount
	name string   // empty for a mount
	dir  bool     // the name is that of a directory
}

// Undo unmounts what was mounted since Record, and removes the names that were made, the last first. It goes on after
// an error. What was replaced stays replaced. The mount namespace of the process must be the container's.
func (r *Root) Undo() error {
	var errs []error
	for _, c := range slices.Backward(r.undo) {
		var err error
		switch {
		case c.name == "":
			err = unix.Unmount(fdPath(c.file), unix.MNT_DETACH)
		case c.dir:
			err = unix.Unlinkat(int(c.file.Fd()), c.name, unix.AT_REMOVEDIR)
		default:
			err = unix.Unlinkat(int(c.file.Fd()), c.name, 0)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("take back %s: %w", c.what, err))
		}
	}
	r.forget()
	return errors.Join(errs...)
}

func (r *Root) forget() {
	for _, c := range r.undo {
		closeQuietly(c.file)
	}
	r.undo = nil
}

// record remembers a change, with a handle of its own. An error means that it could not be undone.
func (r *Root) record(what string, file *os.File, name string, dir bool) error {
	if r.undo == nil {
		return nil
	}
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("remember %s: %w", what, err)
	}
	r.undo = append(r.undo, change{what: what, file: os.NewFile(uintptr(fd), what), name: name, dir: dir})
	return nil
}
