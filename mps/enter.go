package mps

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Entry is what a process does that becomes a control daemon, or a program that asks one.
type Entry struct {
	// Own is the GPU's directory.
	Own string
	// Start tells that it is the daemon, of a driver of that version.
	Start  bool
	Driver string
	// DriverRoot is where the driver is installed, or empty: the root directory.
	DriverRoot string
	// Program is nvidia-cuda-mps-control, and Env its environment. It is not that of the process, which may be linked to
	// other libraries.
	Program string
	Env     []string
}

// Enter confines the process to what the program needs and becomes the program. It returns only with an error.
//
// The daemon has the GPU's shm as its /dev/shm. In what containers can change no link is followed from here on,
// whoever asks for it: the program itself was not made for such places, and is root.
func Enter(e Entry) error {
	// Namespaces and capabilities are a thread's, and the program gets those of the thread that becomes it.
	runtime.LockOSThread()
	if err := separate(); err != nil {
		return err
	}
	own, err := openDir(unix.AT_FDCWD, e.Own)
	if err != nil {
		return fmt.Errorf("enter %s: %w", e.Own, err)
	}
	defer own.Close()
	args, capabilities := []string{e.Program}, []int(nil)
	if e.Start {
		args, capabilities = append(args, "-f"), daemonCapabilities
		release, err := e.begin(own)
		if err != nil {
			return err
		}
		defer release()
	}
	if err := e.enterRoot(own); err != nil {
		return fmt.Errorf("confine %s to %s: %w", e.Program, e.Own, err)
	}
	if err := restrict(capabilities); err != nil {
		return fmt.Errorf("confine %s: %w", e.Program, err)
	}
	unix.Umask(0o022)
	return fmt.Errorf("run %s, which must be in the driver's root or in a directory of the system: %w", e.Program, unix.Exec(e.Program, args, e.Env))
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
	if old, err := readRecord(e.Own); err == nil && old.holds() {
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
