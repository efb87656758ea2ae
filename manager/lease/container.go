package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	if err := s.findMarks(dir); err != nil {
		return fmt.Errorf("find the file system of %s: %w", dir, err)
	}
	files, err := os.ReadDir(dir)
	for _, f := range files {
		if isID.MatchString(f.Name()) && !leases[f.Name()] {
			s.unmark(f.Name())
		}
	}
	return err
}

// findMarks finds out where mounts of the files come from.
func (s *Service) findMarks(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	self, err := proc.Self(s.o.Procfs)
	if err != nil {
		return err
	}
	defer self.Close()
	s.marks, err = self.PlaceOf(f)
	return err
}

// leaseContainer is a mount namespace in which the file of a lease is mounted.
type leaseContainer struct {
	namespace string
	pids      []int
	// held keeps the namespace's name from being that of a later one.
	held *os.File
}

// containers returns the containers of a lease; the caller closes them. Other users than the lease's cannot add to
// them: the mount namespace of a container is made by root, or in a user namespace of the user. An error says what
// could not be read, also if there are containers.
func (s *Service) containers(ctx context.Context, id string, user int) ([]leaseContainer, error) {
	namespaces, err := mountNamespaces(s.o.Procfs)
	var found []leaseContainer
	for name, pids := range namespaces {
		c := leaseContainer{namespace: name, pids: pids}
		marked, failed := false, ctx.Err()
		if failed == nil {
			marked, failed = s.isMarked(&c, id, user)
		}
		if marked {
			found = append(found, c)
		} else {
			c.close()
		}
		err = cmp.Or(err, failed)
	}
	return found, err
}

func (c *leaseContainer) close() {
	if c.held != nil {
		_ = c.held.Close()
	}
}

// mountNamespaces returns the processes in each mount namespace but those of the host and of this process. The oldest
// process is the first. An error says what could not be read, also if there are namespaces.
func mountNamespaces(procfs string) (namespaces map[string][]int, err error) {
	self, err := proc.Self(procfs)
	if err != nil {
		return nil, err
	}
	defer self.Close()
	own, err := self.Namespace("mnt")
	if err != nil {
		return nil, err
	}
	pids, err := proc.PIDs(procfs)
	if err != nil {
		return nil, err
	}
	namespaces = map[string][]int{}
	starts := map[int]uint64{}
	for _, pid := range pids {
		name, start, failed := mountNamespace(procfs, pid)
		switch {
		case failed == nil && name != own:
			namespaces[name], starts[pid] = append(namespaces[name], pid), start
		case failed != nil && !isEnd(failed):
			err = fmt.Errorf("process %d: %w", pid, failed)
		}
	}
	if first, err := proc.Open(procfs, 1); err == nil {
		host, _ := first.Namespace("mnt")
		delete(namespaces, host)
		first.Close()
	}
	for _, list := range namespaces {
		slices.SortStableFunc(list, func(a, b int) int { return cmp.Compare(starts[a], starts[b]) })
	}
	return namespaces, err
}

// mountNamespace returns the mount namespace of a process, and when the process was started.
func mountNamespace(procfs string, pid int) (name string, start uint64, err error) {
	p, err := proc.Open(procfs, pid)
	if err != nil {
		return "", 0, err
	}
	defer p.Close()
	if name, err = p.Namespace("mnt"); err != nil {
		return "", 0, err
	}
	stat, err := p.Stat()
	return name, stat.Start, err
}

// isMarked reports whether the file of a lease is mounted in the namespace, which it holds then. It reads the mounts
// of one process: others of the namespace have the same, unless they have changed their root, as the oldest hardly has.
func (s *Service) isMarked(c *leaseContainer, id string, user int) (bool, error) {
	for _, pid := range c.pids {
		marked, err := s.seesMark(c, pid, id, user)
		switch {
		case isEnd(err):
		case err != nil:
			return false, fmt.Errorf("process %d: %w", pid, err)
		default:
			return marked, nil
		}
	}
	return false, nil
}

// isEnd reports whether an error means that a process has ended, or may not be read, as where a security module forbids
// it: what is not known then is as if it was not there.
func isEnd(err error) bool {
	return errors.Is(err, proc.ErrEnded) || errors.Is(err, os.ErrPermission)
}

// seesMark reports whether a process of the namespace sees the file of a lease. If the process is in another namespace
// now, the error wraps proc.ErrEnded.
func (s *Service) seesMark(c *leaseContainer, pid int, id string, user int) (bool, error) {
	p, err := proc.Open(s.o.Procfs, pid)
	if err != nil {
		return false, err
	}
	defer p.Close()
	c.close()
	if c.held, err = p.OpenNamespace("mnt"); err != nil {
		return false, err
	}
	owner, err := p.UserOfMounts()
	if err != nil || owner != 0 && owner != user {
		return false, err
	}
	marked, err := p.HasMount(func(m proc.Mount) bool { return s.isMark(m, id) })
	if err != nil {
		return false, err
	}
	if name, err := p.Namespace("mnt"); err != nil || name != c.namespace {
		return false, cmp.Or(err, proc.ErrEnded)
	}
	return marked, nil
}

// isMark reports whether a mount is that of a lease's file, as an engine makes it. The file is known by its file system
// and its whole path there: anyone can have a file that is named like it. The place in the container counts too: a path
// that another container gets may lead to the file. Engines make the mount private. A shared or slave mount can be a
// copy, which a container with a shared /run has propagated to the host.
func (s *Service) isMark(m proc.Mount, id string) bool {
	return !m.Shared && !m.Slave && m.Point == MarkPath && m.Device == s.marks.Device &&
		strings.TrimSuffix(m.Root, proc.DeletedMount) == s.marks.Root+"/"+id
}

// adoptContainer gives a lease, whose process has ended, to the first process of its containers, and reports false if
// there is none, or once what is left is to be killed. It waits for a container that an engine just starts, or starts
// again. While it is unknown which containers run, it waits too, but not for longer than unknownTime, nor if root has
// ended the lease: what cannot be read may be made by the user. If ctx ends, it returns false.
func (s *Service) adoptContainer(ctx context.Context, b *begun, asked <-chan endRequest) bool {
	until := b.unknownUntil()
	for looked, said := false, false; !b.isDue(); {
		first, err := s.openContainers(ctx, b, until)
		wait := startTime
		switch {
		case first != nil:
			s.setProcess(ctx, b, first)
			return true
		case ctx.Err() != nil:
			return false
		case err != nil && (b.forced.Load() || !time.Now().Before(until)):
			s.o.Log.Warn("lease " + b.Pod.Name + " ends, though it is unknown whether a container of it runs: " +
				wording.OneLine(err))
			return false
		case err != nil:
			if !said {
				s.o.Log.Warn("lease " + b.Pod.Name + " is kept until its containers are known, for " +
					time.Until(until).Round(time.Second).String() + " at most: " + wording.OneLine(err))
			}
			wait, said = min(retryTime, time.Until(until)), true
		case looked:
			return false
		default:
			looked = true
		}
		select {
		case <-ctx.Done():
			return false
		case a := <-asked:
			s.endedBy(b, a)
		case <-time.After(wait):
		}
	}
	return false
}

// openContainers opens the oldest process in containers of a lease, or returns nil if there is none. If the lease is
// over, it asks the first process of each other container to end, and kills all processes once that is due. What it has
// not read at a time counts as unknown.
func (s *Service) openContainers(ctx context.Context, b *begun, until time.Time) (first *process, err error) {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	list, err := s.containers(ctx, b.Pod.Name, b.Caller.UID)
	for i := range list {
		oldest, failed := s.openContainer(b, &list[i])
		list[i].close()
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
func (s *Service) openContainer(b *begun, c *leaseContainer) (oldest *process, err error) {
	for _, pid := range c.pids {
		p, failed := open(s.o.Procfs, s.o.Boot, pid)
		if failed == nil {
			p.inside, failed = p.isIn(c.namespace)
		}
		if failed != nil || !p.inside {
			if failed != nil && !isEnd(failed) {
				err = failed
			}
			p.close()
			continue
		}
		if b.isDue() {
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

// isIn reports whether the process is in a mount namespace.
func (p *process) isIn(namespace string) (bool, error) {
	one, err := proc.Open(p.procfs, p.PID)
	if err != nil {
		return false, err
	}
	defer one.Close()
	name, err := one.Namespace("mnt")
	if err == nil && p.hasEnded() { // what was read may be that of a later process
		err = proc.ErrEnded
	}
	return name == namespace, err
}

// setProcess has a lease be that of a process in its container.
func (s *Service) setProcess(ctx context.Context, b *begun, p *process) {
	s.mu.Lock()
	before := b.process
	b.process, b.ended = p, false
	s.mu.Unlock()
	before.close()
	level := slog.LevelInfo
	if before != nil && before.inside { // a container can have many processes, one after the other
		level = slog.LevelDebug
	}
	s.o.Log.Log(ctx, level, fmt.Sprintf("lease %s goes on: its container runs, as process %d", b.Pod.Name, p.PID))
	err := s.o.Manager.ChangeLease(ctx, b.Pod.UID, func(l *model.Lease) error {
		l.Process, l.InContainer = p.Process, true
		return nil
	})
	if err != nil { // the next start looks for the container too
		s.o.Log.Warn("the process of lease " + b.Pod.Name + " cannot be recorded: " + wording.OneLine(err))
	}
}
