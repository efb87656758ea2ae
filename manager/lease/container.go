package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/model"
)

// Containers can outlive the command that started them. They are found by a file that each gets as a bind mount: the
// mount is there before the container's program, which cannot remove it without the right to mount.

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

// isID matches the IDs of leases.
var isID = regexp.MustCompile(`^[a-z2-7]{8}$`)

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
		if isID.MatchString(f.Name()) && !leases[f.Name()] {
			s.unmark(f.Name())
		}
	}
	return err
}

// containers returns the PIDs in each container of a lease. Other users than the lease's cannot add to them: the mount
// namespace of a container is made by root, or in a user namespace of the user.
func containers(procfs, id string, user int) ([][]int, error) {
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
	host := ""
	if first, err := proc.Open(procfs, 1); err == nil {
		host, _ = first.Namespace("mnt")
		first.Close()
	}
	found := map[string][]int{} // by mount namespace
	for _, pid := range pids {
		namespace, err := markedNamespace(procfs, pid, id, user, own, host)
		switch {
		case isEnd(err):
		case err != nil:
			return nil, fmt.Errorf("process %d: %w", pid, err)
		case namespace != "":
			found[namespace] = append(found[namespace], pid)
		}
	}
	return slices.Collect(maps.Values(found)), nil
}

// isEnd reports whether an error means that a process has ended, or may not be read, as where a security module forbids
// it: what is not known then is as if it was not there.
func isEnd(err error) bool {
	return errors.Is(err, proc.ErrEnded) || errors.Is(err, os.ErrPermission)
}

// markedNamespace returns the mount namespace of a process if that is of a container of a lease, and otherwise "". The
// namespaces of the host and of this process are of none. In others each process is asked, since one that has changed
// its root does not see the mount.
func markedNamespace(procfs string, pid int, id string, user int, others ...string) (string, error) {
	p, err := proc.Open(procfs, pid)
	if err != nil {
		return "", err
	}
	defer p.Close()
	namespace, err := p.Namespace("mnt")
	if err != nil || slices.Contains(others, namespace) {
		return "", err
	}
	owner, err := p.UserOfMounts()
	if err != nil || owner != 0 && owner != user {
		return "", err
	}
	mounts, err := p.Mounts()
	if err != nil || !slices.ContainsFunc(mounts, func(m proc.Mount) bool { return isMark(m, id) }) {
		return "", err
	}
	return namespace, nil
}

// isMark reports whether a mount is that of a lease's file. Engines make it private. A shared or slave mount can be a
// copy, which a container with a shared /run has propagated to the host.
func isMark(m proc.Mount, id string) bool {
	path := strings.TrimSuffix(m.Root, "//deleted")
	return !m.Shared && !m.Slave && strings.HasSuffix(path, "/"+marksName+"/"+id)
}

// adoptContainer gives a lease, whose process has ended, to the first process of its containers, and reports false if
// there is none. It waits while that is unknown, and for a container that an engine just starts, or starts again. If
// ctx ends, it returns false.
func (s *Service) adoptContainer(ctx context.Context, b *begun) bool {
	for looked, said := false, false; ; {
		first, err := s.openContainers(b)
		wait := startTime
		switch {
		case first != nil:
			s.setProcess(ctx, b, first)
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

// openContainers opens the oldest process in containers of a lease, or returns nil if there is none. If the lease is
// over, it asks the first process of each other container to end, and later kills all processes.
func (s *Service) openContainers(b *begun) (first *process, err error) {
	list, err := containers(s.o.Procfs, b.Pod.Name, b.Caller.UID)
	if err != nil {
		return nil, err
	}
	for _, pids := range list {
		oldest, failed := s.openContainer(b, pids)
		err = cmp.Or(err, failed)
		if oldest == nil {
			continue
		}
		if first == nil || oldest.before(first) {
			oldest, first = first, oldest
		}
		if !b.kill.IsZero() {
			_ = oldest.terminate(b.user) // it fails only for a process that has ended
		}
		oldest.close()
	}
	return first, err
}

// openContainer opens the oldest process of one container. It kills all processes if that is due.
func (s *Service) openContainer(b *begun, pids []int) (oldest *process, err error) {
	for _, pid := range pids {
		p, failed := open(s.o.Procfs, s.o.Boot, pid)
		if failed == nil {
			p.inside, failed = p.isInside(b.Pod.Name, b.Caller.UID)
		}
		if failed != nil || !p.inside {
			if failed != nil && !isEnd(failed) {
				err = failed
			}
			p.close()
			continue
		}
		if !b.kill.IsZero() && !time.Now().Before(b.kill) {
			_ = p.signal(b.user, unix.SIGKILL)
		}
		if oldest == nil || p.before(oldest) {
			p, oldest = oldest, p
		}
		p.close()
	}
	return oldest, err
}

// before reports whether the process is older than another one.
func (p *process) before(other *process) bool {
	return cmp.Or(cmp.Compare(p.Start, other.Start), p.PID-other.PID) < 0 // many start within a tick
}

// isInside reports whether the process is in a container of a lease.
func (p *process) isInside(id string, user int) (bool, error) {
	namespace, err := markedNamespace(p.procfs, p.PID, id, user)
	if err == nil && p.hasEnded() { // what was read may be that of a later process
		err = proc.ErrEnded
	}
	return namespace != "", err
}

// setProcess has a lease be that of a process in its container.
func (s *Service) setProcess(ctx context.Context, b *begun, p *process) {
	s.mu.Lock()
	before := b.process
	b.process, b.ended = p, false
	s.mu.Unlock()
	before.close()
	s.o.Log.Info(fmt.Sprintf("lease %s goes on: its container runs, as process %d", b.Pod.Name, p.PID))
	err := s.o.Manager.ChangeLease(ctx, b.Pod.UID, func(l *model.Lease) error {
		l.Process = p.Process
		return nil
	})
	if err != nil { // the next start looks for the container too
		s.o.Log.Warn("the process of lease " + b.Pod.Name + " cannot be recorded: " + wording.OneLine(err))
	}
}
