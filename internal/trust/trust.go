// Package trust checks whether users other than root could change what a path leads to, before root runs it, loads it
// or writes there.
//
// A path is safe if all its files belong to root or to this process's user and are not writable for a group or for all
// users. Its files are the file itself, each symbolic link on the way, and each directory above one of these. If the
// file will run as root, files of this process's user are not safe either. If an access control list allows more users
// to write, the group's permission bits show it.
//
// In a sticky directory, such as /tmp or /nix/store, only an existing directory is safe: other users cannot replace a
// directory, but they can create a missing name, or give a file another name with a hard link.
//
// In the user namespace of a rootless engine, files of root and of all other users of the host seem to belong to the
// overflow user. They count as root's: the process has only the rights of the engine's user there, and the files that
// it reads are root's.
//
// Only root can make a safe path unsafe, so the path can be used after the check without a race. The check trusts the
// owners that a file system reports; a user's FUSE mount with allow_other can report wrong ones.
package trust

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrUnsafe means that other users could change what a path leads to. The wrapping error names the unsafe file.
var ErrUnsafe = errors.New("others can change it")

// File returns an error unless path leads to a regular file that no other user can change or replace. The error wraps
// ErrUnsafe or the error of opening the file.
func File(path string) error { return file(path, os.Geteuid()) }

// RootFile does what File does, for a file that will run as root: only root's files are safe.
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

// Dir returns an error that wraps ErrUnsafe if other users can change or replace a directory. If the directory does
// not exist, the existing part of its path is checked.
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

// OpenDir opens a directory, whoever owns it. If another user could have made a symbolic link in the path, the error
// wraps ErrUnsafe. In a sticky directory, links of this process's user are followed. The returned file stays the same
// directory even if the path is replaced.
func OpenDir(path string) (*os.File, error) { return openDir(path, unix.O_RDONLY) }

// OpenDirPath does what OpenDir does, with O_PATH: the result only identifies the directory, which need not be
// readable.
func OpenDirPath(path string) (*os.File, error) { return openDir(path, unix.O_PATH) }

func openDir(path string, flags int) (*os.File, error) {
	w, err := follow(path, os.Geteuid(), false)
	if err != nil {
		return nil, err
	}
	defer w.close()
	fd, err := unix.Openat(w.fd, ".", flags|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}
