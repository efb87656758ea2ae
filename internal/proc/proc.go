// Package proc reads processes in the host's /proc: their users, cgroups and namespaces.
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

	"gpu-cdi-plugin/internal/host"
)

// maxFile limits how many bytes of a file in /proc/PID are read.
const maxFile = 64 << 10

// Process is a process, identified by its open directory in /proc. Everything that its methods read belongs to that
// process: once it has ended they fail with [ErrEnded], even if another process has its PID.
type Process struct {
	PID int
	dir *os.Root
}

// ErrEnded means that the process does not exist or has ended.
var ErrEnded = errors.New("the process has ended")

// Open opens a process. The error is ErrEnded if no process has the PID.
func Open(h host.Host, pid int) (*Process, error) {
	dir, err := os.OpenRoot(h.Proc(strconv.Itoa(pid)))
	if err != nil {
		return nil, Error(err)
	}
	return &Process{PID: pid, dir: dir}, nil
}

// Close closes the directory.
func (p *Process) Close() { _ = p.dir.Close() }

// Error wraps the errors that /proc returns for an ended process with ErrEnded.
func Error(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("%w: %w", ErrEnded, err)
	}
	return err
}

// PIDs returns the processes that are visible in /proc, in ascending order.
func PIDs(h host.Host) ([]int, error) {
	entries, err := os.ReadDir(h.Proc())
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

func (p *Process) read(name string) (string, error) {
	f, err := p.dir.Open(name)
	if err != nil {
		return "", Error(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile))
	return string(text), Error(err)
}

// Status has values of /proc/PID/status (proc_pid_status(5)).
type Status struct {
	// UIDs are the real, effective, saved and file system user IDs.
	UIDs []string
	// Capabilities are the effective ones, in the process's user namespace.
	Capabilities uint64
}

// Status reads the process's status.
func (p *Process) Status() (Status, error) {
	text, err := p.read("status")
	if err != nil {
		return Status{}, err
	}
	return parseStatus(text)
}

func parseStatus(text string) (Status, error) {
	var s Status
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		if len(fields) == 0 {
			continue
		}
		var err error
		switch key {
		case "Uid":
			s.UIDs = fields
		case "CapEff":
			s.Capabilities, err = strconv.ParseUint(fields[0], 16, 64)
		default:
			continue
		}
		if err != nil {
			return Status{}, fmt.Errorf("%s of a process: %w", key, err)
		}
		seen[key] = true
	}
	if len(seen) != 2 {
		return Status{}, errors.New("the status of a process is not complete")
	}
	return s, nil
}

// Cgroups reads the process's cgroups.
func (p *Process) Cgroups() (Cgroups, error) {
	text, err := p.read("cgroup")
	return parseCgroups(text), err
}

// Command returns the name of the process, which the process can choose.
func (p *Process) Command() string {
	text, err := p.read("comm")
	if name := strings.TrimSuffix(text, "\n"); err == nil && name != "" {
		return name
	}
	return "unknown command"
}

// Executable returns the name of the process's executable without its directory.
func (p *Process) Executable() (string, error) {
	program, err := p.dir.Readlink("exe")
	if err != nil {
		return "", Error(err)
	}
	return path.Base(strings.TrimSuffix(program, " (deleted)")), nil
}

// The host's namespaces, with which the kernel starts. Their numbers are fixed (linux/nsfs.h, PID_NS_INIT_INO and
// USER_NS_INIT_INO).
const (
	InitialPID  = "pid:[4026531836]"
	InitialUser = "user:[4026531837]"
)

// In reports whether the process is in a namespace of the host, [InitialPID] or [InitialUser].
func (p *Process) In(namespace string) bool {
	kind, _, _ := strings.Cut(namespace, ":")
	link, err := p.dir.Readlink("ns/" + kind)
	return err == nil && link == namespace
}

// ErrNotHost means that this process cannot see all processes of the host.
var ErrNotHost = errors.New("this program does not run in the host's PID namespace")

// SeesAll returns an error unless this process sees all processes of the host; ErrNotHost means that it does not.
func SeesAll(h host.Host) error {
	own, err := os.Readlink(h.Proc("self", "ns", "pid"))
	if err != nil {
		return err
	}
	if own != InitialPID {
		return ErrNotHost
	}
	return nil
}
