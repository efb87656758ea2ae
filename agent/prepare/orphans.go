package prepare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
)

// orphaned reports whether the process was left behind by a container that is gone. The rule is made so that it can
// never be true for a container that runs:
//
// A container runs as long as its first process. Runtimes (runc, crun) start that as the leader of a session; it cannot
// cease to be one. So the container is gone if, in its cgroup and below, no process belongs to a session whose leader
// still exists, be it in another cgroup. As long as a session has a process, its leader's PID is not given to another
// one, so an existing PID is the leader. One that has ended and was not collected counts as existing: only its main
// thread may have ended.
//
// The process of an exec may outlive the first process. With runc it leads a session. With crun it has a session
// without a leader, unless it has a terminal: an intermediate process makes the session and ends at once. So nothing is
// an orphan while the container has processes of two sessions, either of which may be an exec's. If a single session
// without a leader is left, be it an exec's, the first process has ended and with it the container.
//
// Besides, no process of the cgroup may be process 1 of a PID namespace: the kernel ends such a namespace with it, so
// what a container with its own namespace leaves behind is being ended already. So this finds what stays of containers
// that share the PID namespace of their host or pod, when the runtime did not end it.
//
// A process that is in no container's cgroup is not an orphan. Where containers are nested, the outermost counts. The
// list of processes is not read at one time, but a first process is older than what it started, so it cannot be missed
// for being new. Nothing enters the cgroup of a container without a first process: runtimes refuse an exec.
//
// That the cgroup was removed proves nothing more: the kernel does not remove one that has a living process.
func (p *process) orphaned(h host.Host) (bool, error) {
	groups, err := p.cgroups()
	if err != nil {
		return false, err
	}
	container, ok := groups.container()
	if !ok {
		return false, nil
	}
	own, err := p.status()
	if err != nil || own.session == 0 { // 0 is a leader outside the PID namespace of /proc
		return false, err
	}
	dir, err := os.Open(h.Proc())
	if err != nil {
		return false, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return false, err
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		mayRun, err := containerMayRun(h, pid, container, own.session)
		if mayRun || err != nil {
			return false, err
		}
	}
	leader, err := openProcess(h, own.session)
	if err == nil {
		leader.close()
	}
	if !errors.Is(err, errEnded) {
		return false, err
	}
	groups, err = p.cgroups() // it may have been moved meanwhile
	return err == nil && groups.within(container), err
}

// containerMayRun reports whether a process shows that a container may run: it is in the container, and in another
// session than the possible orphan, or process 1 of a PID namespace.
func containerMayRun(h host.Host, pid int, container string, session int) (bool, error) {
	p, err := openProcess(h, pid)
	if errors.Is(err, errEnded) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer p.close()
	groups, err := p.cgroups()
	if errors.Is(err, errEnded) || err == nil && !groups.within(container) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	s, err := p.status()
	if errors.Is(err, errEnded) {
		return false, nil
	}
	return s.first || s.session != session, err
}

// How long a process may take to end after SIGTERM, and after SIGKILL.
const (
	termWait = 2 * time.Second
	killWait = 2 * time.Second
)

// end ends the process: by SIGTERM, and by SIGKILL if that does not do it.
func (p *process) end(ctx context.Context) error {
	for _, step := range []struct {
		signal unix.Signal
		wait   time.Duration
	}{{unix.SIGTERM, termWait}, {unix.SIGKILL, killWait}} {
		if err := p.signal(step.signal); err != nil {
			if errors.Is(err, unix.ESRCH) {
				return nil
			}
			return fmt.Errorf("send %s: %w", unix.SignalName(step.signal), err)
		}
		for end := time.Now().Add(step.wait); time.Now().Before(end); {
			if p.ended() {
				return nil
			}
			if !sleep(ctx, 10*time.Millisecond) {
				return context.Cause(ctx)
			}
		}
	}
	return errors.New("it does not end although it was killed: the driver may hang in it, and the GPU need a reset")
}

// signal sends a signal to the process and, after its end, to no other: the kernel takes the open directory in /proc
// for a pidfd (pidfd_send_signal(2)).
func (p *process) signal(s unix.Signal) error {
	dir, err := p.dir.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	return unix.PidfdSendSignal(int(dir.Fd()), s, nil, 0)
}
