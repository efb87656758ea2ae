package lease

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/manager/model"
)

// process is a process that has a lease, by its pidfd: a later process with the same PID is another one.
type process struct {
	model.Process

	procfs string
	pidfd  *os.File
	inside bool // whether it is in a container of the lease
}

// open opens a process. The error wraps proc.ErrEnded if it has ended.
func open(procfs, boot string, pid int) (*process, error) {
	if pid < 1 { // the kernel says 0 of a process that it does not see
		return nil, errors.New("it runs in another PID namespace")
	}
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		return nil, proc.ErrEnded // for the latter two, the PID is now the ID of a thread of another process
	case err != nil:
		return nil, fmt.Errorf("open the process %d: %w", pid, err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that the runtime's poller waits for it
		_ = unix.Close(fd)
		return nil, fmt.Errorf("open the process %d: %w", pid, err)
	}
	p := &process{procfs: procfs, pidfd: os.NewFile(uintptr(fd), "pidfd")}
	stat, err := p.stat(pid)
	if err == nil && p.ended(uintptr(fd)) { // what was read may be that of a later process
		err = proc.ErrEnded
	}
	if err != nil {
		p.close()
		return nil, err
	}
	p.Process = model.Process{PID: pid, Start: stat.Start, Boot: boot}
	return p, nil
}

// reopen opens a process of which a record tells. The error wraps proc.ErrEnded if it has ended.
func reopen(procfs, boot string, r model.Process) (*process, error) {
	if r.PID == 0 || r.Boot != boot {
		return nil, proc.ErrEnded
	}
	p, err := open(procfs, boot, r.PID)
	if err == nil && p.Process != r {
		p.close()
		return nil, proc.ErrEnded
	}
	return p, err
}

// close closes a process, unless that is nil.
func (p *process) close() {
	if p != nil {
		_ = p.pidfd.Close()
	}
}

func (p *process) stat(pid int) (proc.Stat, error) {
	one, err := proc.Open(p.procfs, pid)
	if err != nil {
		return proc.Stat{}, err
	}
	defer one.Close()
	return one.Stat()
}

// ended reports whether the process has ended. Its parent may not have waited for it.
func (p *process) ended(fd uintptr) bool {
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return n > 0
}

// hasEnded reports whether the process has ended, or was closed.
func (p *process) hasEnded() bool {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return true
	}
	ended := true
	_ = raw.Control(func(fd uintptr) { ended = p.ended(fd) })
	return ended
}

// wait waits until the process has ended, or ctx ends; then it returns an error.
func (p *process) wait(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = p.pidfd.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(p.ended)
}

// waitOr is wait, which only ctx ends for nil.
func (p *process) waitOr(ctx context.Context) error {
	if p == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return p.wait(ctx)
}

// terminate asks the process to end, as a user does. There is nothing to do if it has ended, or is nil.
func (p *process) terminate(user int) error {
	if p == nil || p.hasEnded() {
		return nil
	}
	if err := p.signal(user, unix.SIGTERM); !p.hasEnded() { // it may be closed meanwhile
		return err
	}
	return nil
}

// kill kills the process, as a user does. There is nothing to do if it has ended, or is nil.
func (p *process) kill(user int) error {
	if p == nil || p.hasEnded() {
		return nil
	}
	if err := p.signal(user, unix.SIGKILL); !errors.Is(err, proc.ErrEnded) {
		return err
	}
	return nil
}

// signal sends a signal if a user may do so himself. A process of root stays one, even if the command that the user
// started has become it (sudo). Between the check and the signal the process can become one
// of root too; its user could as well have sent the signal before. The processes in a container of the lease are its
// user's, whatever their user IDs are.
func (p *process) signal(user int, s unix.Signal) error {
	if !p.inside {
		if err := p.belongsTo(user); err != nil {
			return err
		}
	}
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = unix.PidfdSendSignal(int(fd), s, nil, 0) }); err != nil {
		return err
	}
	if errors.Is(failed, unix.ESRCH) {
		return nil
	}
	return failed
}

// belongsTo returns an error that wraps ErrNotYours unless a user may signal the process, by the rule of kill(2): its
// real or saved user ID is the user's, or the user is root. A set-user-ID program that has not become root yet, such as
// su at its prompt, is still its user's.
func (p *process) belongsTo(user int) error {
	one, err := proc.Open(p.procfs, p.PID)
	if err != nil {
		return err
	}
	defer one.Close()
	stat, err := one.Stat()
	if err != nil {
		return err
	}
	status, err := one.Status()
	if err != nil {
		return err
	}
	if stat.Start != p.Start {
		return proc.ErrEnded
	}
	real, effective, saved := status.UIDs[0], status.UIDs[1], status.UIDs[2]
	if id := strconv.Itoa(user); user != 0 && real != id && saved != id {
		return fmt.Errorf("process %d runs as user %s: %w", p.PID, effective, ErrNotYours)
	}
	return nil
}

// sinceBoot is the time since the boot. Changes of the clock do not change it, and it counts while the host sleeps.
func sinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("clock_gettime: " + err.Error()) // each Linux has this clock
	}
	return time.Duration(t.Nano())
}
