package lease

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/model"
)

// Containers can outlive the command that started them, so they are found by a file that each gets as a bind mount: the
// mount is there before the container's program, and only who may mount in the container can remove it.

// MarkPath is where a container finds the file of its lease, which has the lease's ID.
const MarkPath = "/run/gpu/lease"

// marksName is the name of the directory with the files of leases.
const marksName = "leases"

// markPath returns the path of a lease's file.
func (s *Service) markPath(id string) string { return filepath.Join(s.o.Dir, marksName, id) }

// mark makes the file of a lease, and adds it to what the lease's containers get.
func (s *Service) mark(g *Granted) error {
	path := s.markPath(g.ID)
	if err := fileio.Replace(path, []byte(g.ID+"\n"), 0o444); err != nil {
		return fmt.Errorf("make the file of the lease: %w", err)
	}
	mounts := append(slices.Clone(g.Options.Mounts), model.Mount{
		ContainerPath: MarkPath, HostPath: path, ReadOnly: true,
	})
	slices.SortFunc(mounts, func(a, b model.Mount) int { return strings.Compare(a.ContainerPath, b.ContainerPath) })
	g.Options.Mounts = mounts
	return nil
}

// unmark removes the file of a lease, if there is one.
func (s *Service) unmark(id string) {
	if err := os.Remove(s.markPath(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		s.o.Log.Warn("the file of a lease that has ended is left: " + wording.OneLine(err))
	}
}

// makeMarks makes the directory of the files, and removes the files of leases that have ended.
func (s *Service) makeMarks(leases map[string]bool) error {
	dir := filepath.Join(s.o.Dir, marksName)
	if err := fileio.MakeDirs(dir); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // rootless engines open the files
		return err
	}
	files, err := os.ReadDir(dir)
	for _, f := range files {
		if !leases[f.Name()] {
			s.unmark(f.Name())
		}
	}
	return err
}

// containerProcesses returns the processes in containers of a lease. Other users than the lease's cannot add to them:
// the mount namespace of a container is made by root, or in a user namespace of the user.
func containerProcesses(procfs, id string, user int) ([]int, error) {
	pids, err := proc.PIDs(procfs)
	if err != nil {
		return nil, err
	}
	self, err := proc.Self(procfs)
	if err != nil {
		return nil, err
	}
	defer self.Close()
	own, err := self.Namespace("mnt")
	if err != nil {
		return nil, err
	}
	var list []int
	marked := map[string]bool{own: false}               // by the mount namespace
	if first, err := proc.Open(procfs, 1); err == nil { // the host's own namespace is that of no container
		if host, err := first.Namespace("mnt"); err == nil {
			marked[host] = false
		}
		first.Close()
	}
	for _, pid := range pids {
		p, err := proc.Open(procfs, pid)
		if err != nil {
			continue
		}
		namespace, err := p.Namespace("mnt")
		is, known := marked[namespace]
		if err == nil && !known { // a zombie has none
			is, known = hasMark(p, id, user)
			if known {
				marked[namespace] = is
			}
		}
		p.Close()
		if is {
			list = append(list, pid)
		}
	}
	return list, nil
}

// hasMark reports whether a process is in a container of a lease, and whether that is known. Engines make the mount
// private. Where it is not, it came from the container, which has shared its /run with the host.
func hasMark(p *proc.Process, id string, user int) (is, known bool) {
	owner, err := p.UserOfMounts()
	if err != nil || owner != 0 && owner != user {
		return false, err == nil
	}
	mounts, err := p.Mounts()
	return slices.ContainsFunc(mounts, func(m proc.Mount) bool {
		return !m.Shared && !m.Slave && strings.HasSuffix(strings.TrimSuffix(m.Root, "//deleted"), "/"+marksName+"/"+id)
	}), err == nil
}

// runsOn reports whether a container of a lease has outlived the lease's process. The lease is then that of the
// container's first process. While that is unknown it waits, also for a container that an engine just starts, or starts
// again. If ctx ends, it returns false.
func (s *Service) runsOn(ctx context.Context, b *begun) bool {
	for looked, said := false, false; ; {
		first, err := s.firstInside(b)
		wait := startTime
		switch {
		case first != nil:
			s.follows(ctx, b, first)
			return true
		case err != nil:
			if !said {
				s.o.Log.Warn("lease " + b.Pod.Name + " is kept until its containers are known: " + wording.OneLine(err))
			}
			wait, said = retryTime, true
		case looked:
			return false
		default:
			looked = true
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait):
		}
	}
}

// firstInside opens the oldest process in containers of a lease, or returns nil if there is none. If the time of the
// lease is over for longer than they have to end, it kills them all.
func (s *Service) firstInside(b *begun) (first *process, err error) {
	pids, err := containerProcesses(s.o.Procfs, b.Pod.Name, b.Caller.UID)
	for _, pid := range pids {
		p, failed := open(s.o.Procfs, s.o.Boot, pid)
		if failed == nil {
			failed = p.checkMark(b.Pod.Name, b.Caller.UID)
		}
		if failed != nil {
			if !errors.Is(failed, proc.ErrEnded) {
				err = failed
			}
			p.close()
			continue
		}
		p.inside = true
		if !b.kill.IsZero() && !time.Now().Before(b.kill) {
			_ = p.signal(b.user, unix.SIGKILL) // it fails only for a process that has ended
		}
		if first == nil || p.Start < first.Start {
			p, first = first, p
		}
		p.close()
	}
	return first, err
}

// checkMark returns an error that wraps proc.ErrEnded unless the process is in a container of a lease: its PID may have
// been that of one before.
func (p *process) checkMark(id string, user int) error {
	one, err := proc.Open(p.procfs, p.PID)
	if err != nil {
		return err
	}
	defer one.Close()
	is, known := hasMark(one, id, user)
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	alive := false
	if err := raw.Control(func(fd uintptr) { alive = !p.ended(fd) }); err != nil {
		return err
	}
	switch {
	case !alive || known && !is: // what was read may be that of a later process
		return proc.ErrEnded
	case !known:
		return fmt.Errorf("the mounts of process %d cannot be read", p.PID)
	}
	return nil
}

// follows has a lease be that of a process in its container.
func (s *Service) follows(ctx context.Context, b *begun, first *process) {
	s.mu.Lock()
	before := b.process
	b.process, b.ended = first, false
	s.mu.Unlock()
	before.close()
	s.o.Log.Info(fmt.Sprintf("lease %s goes on: its container runs, as process %d", b.Pod.Name, first.PID))
	err := s.o.Manager.ChangeLease(ctx, b.Pod.UID, func(l *model.Lease) error {
		l.Process = first.Process
		return nil
	})
	if err != nil { // the next start looks for the container too
		s.o.Log.Warn("the process of lease " + b.Pod.Name + " cannot be recorded: " + wording.OneLine(err))
	}
}
