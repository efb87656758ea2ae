package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// entry is how a process becomes the control program. It is the argument of Enter, as JSON.
type entry struct {
	// Dir is the GPU's directory.
	Dir string
	// Daemon makes it the GPU's daemon, instead of a client that sends the daemon commands.
	Daemon  bool
	Program Program
}

// ErrArgument is that the argument of Enter is malformed.
var ErrArgument = errors.New("the argument does not say how to become the MPS control program")

// Enter confines the process to what the control program needs and becomes it. arg is the last argument that the
// supervisor gave this process. Enter returns only with an error.
//
// The program sees the GPU's shm as /dev/shm. It follows no link in the directories that containers can change: it runs
// as root and does not expect hostile directories.
func Enter(arg string) error {
	var e entry
	if err := json.Unmarshal([]byte(arg), &e); err != nil {
		return fmt.Errorf("%w: %w", ErrArgument, err)
	}
	unix.Umask(0o022)
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
	path := e.Program.Path
	args, capabilities := []string{path}, []int(nil)
	if e.Daemon {
		args, capabilities = append(args, "-f"), daemonCapabilities
		lock, err := e.begin(gpu)
		if err != nil {
			return err
		}
		defer lock.Close() // by exec
	}
	if err := e.enterRoot(gpu); err != nil {
		return fmt.Errorf("confine %s to %s: %w", path, e.Dir, err)
	}
	if err := restrict(capabilities); err != nil {
		return fmt.Errorf("confine %s: %w", path, err)
	}
	return fmt.Errorf("run %s, which must be in the driver's root or in a directory of the system: %w", path,
		unix.Exec(path, args, e.Program.environment(e.Dir)))
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
// The GPU's directory is locked until the file that it returns is closed.
func (e *entry) begin(gpu *os.File) (lock *os.File, err error) {
	lock, err = os.Open(inProc(gpu))
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", e.Dir, err)
	}
	defer func() {
		if err != nil {
			_ = lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s, another start is in progress: %w", e.Dir, err)
	}
	if old, err := readRecord(e.Dir); err == nil && old.matches() {
		return nil, fmt.Errorf("process %d is the GPU's daemon already", old.PID)
	}
	if err := clearDir(gpu, pipeName); err != nil {
		return nil, fmt.Errorf("clear %s of %s: %w", pipeName, e.Dir, err)
	}
	r, err := recordOf(os.Getpid(), e.Program.Driver)
	if err == nil {
		err = r.write(e.Dir)
	}
	return lock, err
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
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := root.RemoveAll(e.Name()); err != nil {
			return err
		}
	}
	return nil
}
