package rootfs

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Record begins to record what is created and mounted, so that Undo can revert it.
func (r *Root) Record() { r.undo = []change{} }

// change is a name that was created in a directory, or a mount.
type change struct {
	what string
	file *os.File // the directory of the name, or the mount
	name string   // empty for a mount
	dir  bool     // the name is a directory
	old  string   // the replaced file is kept in the same directory under this name; empty if there was no file
}

// Undo unmounts what was mounted since Record, and removes the files that were created, the last first. Replaced files
// get their names again. It continues after an error. The process must be in the container's mount namespace.
func (r *Root) Undo() error {
	var errs []error
	for _, c := range slices.Backward(r.undo) {
		var err error
		switch {
		case c.old != "":
			err = unix.Renameat(int(c.file.Fd()), c.old, int(c.file.Fd()), c.name)
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

// Keep ends the recording: the changes stay, and the replaced files are removed.
func (r *Root) Keep() error {
	var errs []error
	for _, c := range r.undo {
		if c.old == "" {
			continue
		}
		if err := unix.Unlinkat(int(c.file.Fd()), c.old, 0); err != nil {
			errs = append(errs, fmt.Errorf("remove what %s replaced: %w", c.what, err))
		}
	}
	r.forget()
	return errors.Join(errs...)
}

// replaceKept does what replace does, for a root that records changes. It keeps the replaced file under the name
// `old`, which is empty if there was no file.
func (r *Root) replaceKept(dir *os.File, name string, mk func(temp string) error) (old string, err error) {
	var st unix.Stat_t
	err = unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if r.undo == nil || err != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return "", replace(dir, name, mk)
	}
	temp, err := makeTemp(name, mk)
	if err != nil {
		return "", err
	}
	err = unix.Renameat2(int(dir.Fd()), temp, int(dir.Fd()), name, unix.RENAME_EXCHANGE)
	if err != nil { // EINVAL: the file system does not support it
		err = fmt.Errorf("exchange it with the file there: %w", err)
		return "", errors.Join(err, unix.Unlinkat(int(dir.Fd()), temp, 0))
	}
	return temp, nil
}

func (r *Root) forget() {
	for _, c := range r.undo {
		closeQuietly(c.file)
	}
	r.undo = nil
}

// record records a change, with its own handle of the file. An error means that the change could not be undone.
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
