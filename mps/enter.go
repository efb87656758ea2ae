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

// Entry is how a process becomes the control program: a GPU's daemon, or a client that sends the daemon a command.
type Entry struct {
	// Dir is the GPU's directory.
	Dir string
	// Start makes it the daemon. Driver is the version of its driver, for the record.
	Start  bool
	Driver string
	// DriverRoot is the directory in which the driver is installed; empty means the root directory.
	DriverRoot string
	// Program is the path of nvidia-cuda-mps-control, and Env its whole environment: this process may need other
	// libraries.
	Program string
	Env     []string
}

// Enter confines the process to what the program needs and becomes the program. It returns only with an error.
//
// The program sees the GPU's shm as /dev/shm. It follows no link in the directories that containers can change: it runs
// as root and does not expect hostile directories.
func Enter(e Entry) error {
	// Namespaces and capabilities belong to a thread, and the program gets those of the thread that calls exec.
	runtime.LockOSThread()
	if err := separate(); err != nil {
		return err
	}
	gpu, err := openDir(unix.AT_FDCWD, e.Dir)
	if err != nil {
		return fmt.Errorf("enter %s: %w", e.Dir, err)
	}
	defer gpu.Close()
	args, capabilities := []string{e.Program}, []int(nil)
	if e.Start {
		args, capabilities = append(args, "-f"), daemonCapabilities
		release, err := e.begin(gpu)
		if err != nil {
			return err
		}
		defer release()
	}
	if err := e.enterRoot(gpu); err != nil {
		return fmt.Errorf("confine %s to %s: %w", e.Program, e.Dir, err)
	}
	if err := restrict(capabilities); err != nil {
		return fmt.Errorf("confine %s: %w", e.Program, err)
	}
	unix.Umask(0o022)
	return fmt.Errorf("run %s, which must be in the driver's root or in a directory of the system: %w", e.Program,
		unix.Exec(e.Program, args, e.Env))
}

func openDir(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// inProc is a path that leads to the open file and nowhere else.
func inProc(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// begin makes this process the GPU's daemon, unless there is one: it clears the pipe directory and writes the record.
// The lock is held until exec.
func (e Entry) begin(gpu *os.File) (release func(), err error) {
	lock, err := os.OpenFile(filepath.Join(e.Dir, lockName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the daemon: %w", err)
	}
	defer func() {
		if err != nil {
			_ = lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s, another start is in progress: %w", lock.Name(), err)
	}
	if old, err := readRecord(e.Dir); err == nil && old.matches() {
		return nil, fmt.Errorf("process %d is the GPU's daemon already", old.PID)
	}
	if err := clearDir(gpu, pipeName); err != nil {
		return nil, fmt.Errorf("clear %s of %s: %w", pipeName, e.Dir, err)
	}
	r, err := recordOf(os.Getpid(), e.Driver)
	if err == nil {
		err = r.write(e.Dir)
	}
	return func() { _ = lock.Close() }, err
}

// clearDir removes everything in a directory. The directory itself stays, since containers have it mounted.
func clearDir(gpu *os.File, name string) error {
	dir, err := openDir(int(gpu.Fd()), name)
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
