package mps

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/regular"
)

// process is a daemon's process. A pidfd identifies it, so that its PID cannot come to mean another process.
type process struct {
	pid   int
	pidfd *os.File
	// ended ends with the process; its cause is an error such as "ended with status 1".
	ended   context.Context
	setEnd  context.CancelCauseFunc
	watched chan struct{} // closed when watch has returned
}

// openProcess opens a process by its PID. If matches is not nil it must confirm that this is the right process, which
// holds as long as the pidfd is open.
func openProcess(pid int, matches func() bool) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	pidfd := os.NewFile(uintptr(fd), fmt.Sprintf("process %d", pid))
	p := &process{pid: pid, pidfd: pidfd, watched: make(chan struct{})}
	if matches != nil && !matches() {
		_ = p.pidfd.Close()
		return nil, fmt.Errorf("open process %d: the PID belongs to another process now", pid)
	}
	p.ended, p.setEnd = context.WithCancelCause(context.Background())
	go p.watch()
	return p, nil
}

// watch waits for the end of the process, or for close.
func (p *process) watch() {
	defer close(p.watched)
	conn, err := p.pidfd.SyscallConn()
	if err != nil {
		return
	}
	err = conn.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err == nil && n == 1
	})
	if err == nil { // otherwise it was closed
		p.setEnd(errors.New(reap(p.pid)))
	}
}

// reap collects the exit status of a process, if it is a child, and describes it. One that was started before this
// program restarted itself by exec is a child too.
func reap(pid int) string {
	var status unix.WaitStatus
	if got, err := unix.Wait4(pid, &status, unix.WNOHANG, nil); err != nil || got != pid {
		return "ended"
	}
	if status.Exited() {
		return fmt.Sprintf("ended with status %d", status.ExitStatus())
	}
	return "was ended by signal " + unix.SignalName(status.Signal())
}

// ReapChildren collects the exit statuses of children that ended while this program restarted itself by exec. It must
// be called before a child is started.
func ReapChildren() {
	for {
		if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// runs reports whether there is a process and it has not ended.
func (p *process) runs() bool { return p != nil && p.ended.Err() == nil }

// done is closed when the process has ended. It is nil if p is.
func (p *process) done() <-chan struct{} {
	if p == nil {
		return nil
	}
	return p.ended.Done()
}

// signal sends a signal to the process and, after its end, to no other.
func (p *process) signal(sig unix.Signal) error {
	conn, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	if err := conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return err
	}
	return sent
}

// hasChildren reports whether the process has children, which are the servers of a control daemon, or may have some.
func (p *process) hasChildren() bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", p.pid, p.pid))
	return err != nil || strings.TrimSpace(string(data)) != ""
}

// hasShm reports whether a daemon has the GPU's shm as /dev/shm, or may have it.
func (p *process) hasShm(gpuDir string) bool {
	var own, current unix.Stat_t
	err := errors.Join(
		unix.Stat(fmt.Sprintf("/proc/%d/root/dev/shm", p.pid), &own),
		unix.Lstat(filepath.Join(gpuDir, shmName), &current))
	return err != nil || own.Dev == current.Dev && own.Ino == current.Ino
}

// close releases the handle. The process continues.
func (p *process) close() {
	if p == nil {
		return
	}
	_ = p.pidfd.Close()
	<-p.watched
}

// record identifies the process of a GPU's daemon, for the next plugin. No container sees the file, and only root can
// read it.
type record struct {
	PID int `json:"pid"`
	// Started is the start of the process in clock ticks since the boot with the ID Boot: proc_pid_stat(5), field 22.
	// No two processes have the same PID and start.
	Started uint64 `json:"started"`
	Boot    string `json:"boot"`
	// Driver is the version of the program's driver.
	Driver string `json:"driver"`
}

// maxRecord bounds the file, in bytes.
const maxRecord = 4096

// recordOf returns the record of a running process.
func recordOf(pid int, driver string) (record, error) {
	started, err := startTime(pid)
	if err != nil {
		return record{}, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return record{}, fmt.Errorf("read the boot ID: %w", err)
	}
	return record{PID: pid, Started: started, Boot: strings.TrimSpace(string(boot)), Driver: driver}, nil
}

// write writes the record into a GPU's directory.
func (r record) write(gpuDir string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write the record of a daemon: %w", err)
	}
	return atomicfile.Write(filepath.Join(gpuDir, recordName), append(data, '\n'), 0o600)
}

// readRecord reads the record in a GPU's directory. If there is none the error is fs.ErrNotExist.
func readRecord(gpuDir string) (record, error) {
	path := filepath.Join(gpuDir, recordName)
	data, err := regular.ReadFile(path, maxRecord)
	if err != nil {
		return record{}, fmt.Errorf("read the record of a daemon: %w", err)
	}
	r, err := parseRecord(data)
	if err != nil {
		return record{}, fmt.Errorf("read %s: %w", path, err)
	}
	return r, nil
}

func parseRecord(data []byte) (record, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, err
	}
	if r.PID <= 1 || r.Started == 0 || r.Boot == "" {
		return record{}, fmt.Errorf("not the record of a process: %s", excerpt(string(data)))
	}
	return r, nil
}

// matches reports whether the process with that PID is the recorded one. The caller has a pidfd of it, so the PID
// cannot pass to another process afterwards.
func (r record) matches() bool {
	now, err := recordOf(r.PID, r.Driver)
	return err == nil && now == r
}

// startTime is the start of a process in clock ticks since the boot.
func startTime(pid int) (uint64, error) {
	path := fmt.Sprintf("/proc/%d/stat", pid)
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read the start of a process: %w", err)
	}
	started, err := parseStart(string(data))
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	return started, nil
}

// parseStart parses field 22 of /proc/PID/stat. The second field is the program's name in parentheses, which may
// contain any character. The third is Z or X for a process that has ended and is not reaped.
func parseStart(stat string) (uint64, error) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const index = 22 - 3 // fields begins with the third
	if len(fields) <= index {
		return 0, errors.New("fewer than 22 fields")
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, errors.New("the process has ended")
	}
	return strconv.ParseUint(fields[index], 10, 64)
}
