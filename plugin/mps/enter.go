package mps

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Entry is what a process does that becomes a control daemon, or a program that asks one. It was started in a mount
// namespace of its own.
type Entry struct {
	// Own is the GPU's directory.
	Own string
	// Start tells that it is the daemon, of a driver of that version.
	Start  bool
	Driver string
	// Program is nvidia-cuda-mps-control, and Env its environment. It is not that of the process, which may be linked to
	// other libraries.
	Program string
	Env     []string
}

// Enter changes what the process sees of the GPU's directories and becomes the program. It returns only with an error.
//
// The daemon has the GPU's shm as its /dev/shm. In what containers can change no link is followed from here on,
// whoever asks for it: the program itself was not made for such places, and is root.
func Enter(e Entry) error {
	if err := follow(); err != nil {
		return err
	}
	own, err := openDir(unix.AT_FDCWD, e.Own)
	if err != nil {
		return fmt.Errorf("enter %s: %w", e.Own, err)
	}
	defer own.Close()
	if err := leaveOthers(e.Own); err != nil {
		return fmt.Errorf("unmount what is of other GPUs: %w", err)
	}
	for _, m := range []struct{ name, at string }{{shmName, "/dev/shm"}, {pipeName, ""}, {logName, ""}} {
		if err := guard(own, m.name, m.at); err != nil {
			return fmt.Errorf("mount %s of %s: %w", m.name, e.Own, err)
		}
	}
	unix.Umask(0o022)
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter /: %w", err)
	}
	args := []string{e.Program}
	if e.Start {
		args = append(args, "-f")
		release, err := e.begin(own)
		if err != nil {
			return err
		}
		defer release()
	}
	return fmt.Errorf("run %s: %w", e.Program, unix.Exec(e.Program, args, e.Env))
}

// follow makes the mount namespace one in which nothing that is mounted is seen elsewhere, and in which what the node
// unmounts is unmounted too. A daemon runs for long: it would keep volumes of pods in use that have ended, which then could
// not be detached from the node.
func follow() error {
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep one's mounts to oneself: %w", err)
	}
	return nil
}

func openDir(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// inProc is the path of an open file that leads to nothing else.
func inProc(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

const (
	guarded = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW
	// noSymFollow is ST_NOSYMFOLLOW of linux/statfs.h.
	noSymFollow = 0x2000
)

// guard mounts a directory at a path, or at its own, so that links in it lead nowhere, and devices in it are none.
func guard(own *os.File, name, at string) error {
	dir, err := openDir(int(own.Fd()), name)
	if err != nil {
		return err
	}
	defer dir.Close()
	to := at
	if to == "" {
		to = inProc(dir)
	}
	if err := unix.Mount(inProc(dir), to, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	// What was opened before is below the mount.
	where, in := unix.AT_FDCWD, at
	if at == "" {
		where, in = int(own.Fd()), name
	}
	mounted, err := openDir(where, in)
	if err != nil {
		return err
	}
	defer mounted.Close()
	if err := unix.Mount("", inProc(mounted), "", unix.MS_BIND|unix.MS_REMOUNT|guarded, ""); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(mounted.Fd()), &st); err != nil {
		return err
	}
	if st.Flags&noSymFollow == 0 {
		return errors.New("the kernel has no mounts that follow no links; MPS needs Linux 5.10")
	}
	return nil
}

// begin makes the process the GPU's daemon, if there is no other: it clears the pipe directory and writes the record.
// The lock is held until the program runs.
func (e Entry) begin(own *os.File) (release func(), err error) {
	lock, err := os.OpenFile(filepath.Join(e.Own, lockName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the daemon: %w", err)
	}
	defer func() {
		if err != nil {
			_ = lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s, which another start holds: %w", lock.Name(), err)
	}
	if old, err := readRecord(e.Own); err == nil && old.PID != os.Getpid() && old.holds() {
		return nil, fmt.Errorf("process %d is the GPU's daemon already", old.PID)
	}
	if err := clearDir(own, pipeName); err != nil {
		return nil, fmt.Errorf("clear %s of %s: %w", pipeName, e.Own, err)
	}
	r, err := recordOf(os.Getpid(), e.Driver)
	if err == nil {
		err = r.write(e.Own)
	}
	return func() { _ = lock.Close() }, err
}

// clearDir removes everything in a directory. Containers go on to see the directory itself.
func clearDir(own *os.File, name string) error {
	dir, err := openDir(int(own.Fd()), name)
	if err != nil {
		return err
	}
	defer dir.Close()
	root, err := os.OpenRoot(inProc(dir))
	if err != nil {
		return err
	}
	defer root.Close()
	list, err := root.Open(".")
	if err != nil {
		return err
	}
	defer list.Close()
	for {
		names, err := list.Readdirnames(256)
		if errors.Is(err, io.EOF) || err == nil && len(names) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := root.RemoveAll(name); err != nil {
				return err
			}
		}
	}
}
