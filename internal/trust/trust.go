// Package trust tells whether somebody else could change what a path leads to, before root runs it, loads it or writes
// there.
//
// A path is safe if everything on its way belongs to root, or to the user that this process runs as, and neither a group
// nor everybody may write to it: the file itself, each symbolic link, and each directory above one of them. For what will
// run as root, the user's own is not safe. In a sticky directory, such as /tmp or /nix/store, only a directory is safe that
// is there already: others cannot replace it, but can make a name that is missing, or another name of a file. An access
// control list that lets others write shows in the group's bits.
//
// Nobody but root can make a safe path unsafe, so there is no race between the check and the use of the same path. The
// check believes what file systems say of owners; that of a user's own FUSE mount with allow_other can lie.
package trust

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrUnsafe is that somebody else could change what a path leads to. The error around it names what on the way is the
// reason.
var ErrUnsafe = errors.New("others can change it")

// File returns an error unless path leads to a regular file that nobody else can change or replace. The error wraps
// ErrUnsafe, or says why there is no such file.
func File(path string) error { return file(path, os.Geteuid()) }

// RootFile is File for what runs as root whoever the caller is: what belongs to the caller is not safe.
func RootFile(path string) error { return file(path, 0) }

func file(path string, owner int) error {
	w, err := follow(path, owner, true)
	if err != nil {
		return err
	}
	defer w.close()
	if w.kind != unix.S_IFREG {
		return fmt.Errorf("%s is not a regular file", path)
	}
	return nil
}

// Dir returns an error that wraps ErrUnsafe if somebody else can change a directory or replace it. Of one that is not
// there yet it checks what there is of the way to it.
func Dir(path string) error {
	w, err := follow(path, os.Geteuid(), true)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer w.close()
	if w.kind != unix.S_IFDIR {
		return &os.PathError{Op: "open", Path: path, Err: unix.ENOTDIR}
	}
	return nil
}

// OpenDirPath is OpenDir for a handle that only names the directory (O_PATH), for which no right to read it is needed.
func OpenDirPath(path string) (*os.File, error) {
	w, err := follow(path, os.Geteuid(), false)
	if err != nil {
		return nil, err
	}
	defer w.close()
	fd, err := unix.Openat(w.fd, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// OpenDir opens a directory, whoever owns it, and follows no link that somebody else could have put on the way: such a
// link is an error that wraps ErrUnsafe. A link of one's own in a sticky directory is none. What is done on the handle
// happens in that directory, whatever becomes of the path meanwhile.
func OpenDir(path string) (*os.File, error) {
	w, err := follow(path, os.Geteuid(), false)
	if err != nil {
		return nil, err
	}
	defer w.close()
	fd, err := unix.Openat(w.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}
