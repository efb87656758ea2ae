// Package proc reads from /proc what a process is: its program, users, cgroups, mounts, namespaces and open devices.
//
// A Process is its directory in /proc, held open: what is read through it never belongs to a later process with the
// same PID. Files are read up to a limit. The functions get the path of /proc, and do not check that procfs is mounted
// there.
package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	maxFile   = 1 << 20  // bytes of a file in /proc/PID
	maxMounts = 64 << 20 // bytes of mountinfo; a namespace has at most 100,000 mounts by default
)

// Process is a process, identified by its open directory in /proc. Everything that its methods read belongs to that
// process: once it has ended they fail with [ErrEnded], even if another process has its PID.
type Process struct {
	PID int
	dir *os.File
}

// ErrEnded means that the process does not exist or has ended.
var ErrEnded = errors.New("the process has ended")

// Open opens a process. The error is ErrEnded if no process has the PID.
func Open(procfs string, pid int) (*Process, error) {
	dir, err := openDir(procfs, strconv.Itoa(pid))
	if err != nil {
		return nil, asEnded(err)
	}
	return &Process{PID: pid, dir: dir}, nil
}

// Self opens the calling thread, whose namespaces may differ from those of other threads of this process.
func Self(procfs string) (*Process, error) {
	dir, err := openDir(procfs, "thread-self")
	if err != nil {
		return nil, err
	}
	return &Process{PID: os.Getpid(), dir: dir}, nil
}

func openDir(procfs, name string) (*os.File, error) {
	return os.OpenFile(path.Join(procfs, name), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

// Close closes the directory of the process.
func (p *Process) Close() { _ = p.dir.Close() }

// asEnded wraps err with ErrEnded if it is one that /proc returns for a process that has ended.
func asEnded(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("%w: %w", ErrEnded, err)
	}
	return err
}

// PIDs returns the processes that are visible in /proc, in ascending order.
func PIDs(procfs string) ([]int, error) {
	entries, err := os.ReadDir(procfs)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

func (p *Process) openat(name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(p.dir.Fd()), name, flags|unix.O_CLOEXEC, 0)
	path := p.dir.Name() + "/" + name
	if err != nil {
		return nil, asEnded(&os.PathError{Op: "open", Path: path, Err: err})
	}
	return os.NewFile(uintptr(fd), path), nil
}

// open opens a file in the process's directory. It follows no link and does not block on a FIFO.
func (p *Process) open(name string) (*os.File, error) {
	return p.openat(name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK)
}

// read returns the content of a file in the process's directory, which open opens.
func (p *Process) read(name string) (string, error) {
	f, err := p.open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return "", asEnded(err)
	}
	if len(text) > maxFile {
		return "", fmt.Errorf("%s has more than %d bytes", f.Name(), maxFile)
	}
	return string(text), nil
}

func (p *Process) readlink(name string) (string, error) {
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(p.dir.Fd()), name, target)
	if err != nil {
		return "", asEnded(&os.PathError{Op: "readlink", Path: p.dir.Name() + "/" + name, Err: err})
	}
	return string(target[:n]), nil
}

// Command returns the name of the process. Any process can choose its name.
func (p *Process) Command() string {
	text, err := p.read("comm")
	if name := strings.TrimSuffix(text, "\n"); err == nil && name != "" {
		return name
	}
	return "unknown command"
}

// Arguments returns the command line of the process, which the process can change.
func (p *Process) Arguments() ([]string, error) {
	text, err := p.read("cmdline")
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(text, "\x00"), "\x00"), nil
}

// Executable returns the path of the process's executable in the process's mount namespace, where any process can have
// any path if it can make one; see Executes.
func (p *Process) Executable() (string, error) {
	program, err := p.readlink("exe")
	return strings.TrimSuffix(program, " (deleted)"), err
}

// Executes reports whether the process executes the file to which a path leads.
func (p *Process) Executes(path string) (bool, error) { return p.executes(unix.AT_FDCWD, path) }

// SameExecutable reports whether two processes execute the same file.
func (p *Process) SameExecutable(other *Process) (bool, error) {
	same, err := p.executes(int(other.dir.Fd()), "exe")
	return same, asEnded(err)
}

func (p *Process) executes(dir int, path string) (bool, error) {
	var a, b unix.Stat_t
	if err := unix.Fstatat(int(p.dir.Fd()), "exe", &a, 0); err != nil {
		return false, asEnded(&os.PathError{Op: "stat", Path: p.dir.Name() + "/exe", Err: err})
	}
	if err := unix.Fstatat(dir, path, &b, 0); err != nil {
		return false, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return a.Dev == b.Dev && a.Ino == b.Ino, nil
}
