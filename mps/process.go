package mps

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// process is a daemon's, held by a handle of the kernel's, so that its number cannot come to mean another.
type process struct {
	pid    int
	handle *os.File
	// gone is closed when the process has ended; then how says how.
	gone chan struct{}
	how  string
	// watched is closed when nobody waits for the process any more.
	watched chan struct{}
}

// openProcess takes a handle of the process. If ours is not nil it must say that it is the right one, which it can while
// the handle is held.
func openProcess(pid int, ours func() bool) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("take hold of process %d: %w", pid, err)
	}
	p := &process{
		pid: pid, handle: os.NewFile(uintptr(fd), fmt.Sprintf("process %d", pid)),
		gone: make(chan struct{}), watched: make(chan struct{}),
	}
	if ours != nil && !ours() {
		_ = p.handle.Close()
		return nil, fmt.Errorf("process %d is another one", pid)
	}
	go p.watch()
	return p, nil
}

// watch waits for the end of the process, or for close.
func (p *process) watch() {
	defer close(p.watched)
	conn, err := p.handle.SyscallConn()
	if err != nil {
		return
	}
	if err := conn.Read(ended); err != nil {
		return // closed
	}
	p.how = reap(p.pid)
	close(p.gone)
}

// ended reports whether the process of a handle has ended.
func ended(handle uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(handle), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// reap takes the status of a process that has ended, if it is a child of ours, and says what it was. A process that an
// earlier plugin started is one too if that became this one by exec.
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

// ReapLeft takes the statuses of children that ended while the process became this one by exec. It must come before
// anything else starts one.
func ReapLeft() {
	for {
		if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// runs reports whether the process is there.
func (p *process) runs() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.gone:
		return false
	default:
		return true
	}
}

// end is the channel that is closed at the end of the process; of no process it never is.
func (p *process) end() <-chan struct{} {
	if p == nil {
		return nil
	}
	return p.gone
}

// signal sends a signal. A process that has ended gets none, nor does any other.
func (p *process) signal(sig unix.Signal) error {
	conn, err := p.handle.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	if err := conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return err
	}
	return sent
}

// serving reports whether the process has children: the servers of a control daemon. If that cannot be known it says so.
func (p *process) serving() bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", p.pid, p.pid))
	return err != nil || strings.TrimSpace(string(data)) != ""
}

// close lets go of the process, which goes on.
func (p *process) close() {
	if p == nil {
		return
	}
	_ = p.handle.Close()
	<-p.watched
}
