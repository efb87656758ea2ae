package live

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
)

// OpenRuntime opens the runtime: the process that runs this hook, its parent. Call it first: if the runtime ends, this
// hook gets another parent, such as process 1.
func OpenRuntime(h host.Host) (*proc.Process, error) { return openRuntime(h, os.Getppid()) }

func openRuntime(h host.Host, pid int) (*proc.Process, error) {
	if pid <= 1 {
		return nil, fmt.Errorf("the parent of this hook is process %d: the runtime that ran it has ended", pid)
	}
	p, err := proc.Open(h.Proc(), pid)
	if err != nil {
		return nil, fmt.Errorf("open the runtime, process %d: %w", pid, err)
	}
	return p, nil
}

// process is the first process of a container. It waits until the runtime's hooks have run.
type process struct {
	*proc.Process
	runtime *proc.Process
	// mounts is the mount namespace of the container's process, and own that of this hook.
	mounts, own *os.File
	// hasUsers means that the process has a user namespace other than the host's.
	hasUsers bool
	uid, gid proc.IDMap
	// hostRoot is the root directory of this hook.
	hostRoot fs.FileInfo
}

// openProcess opens the process with an ID. The runtime must have created it, and it must have its own mount
// namespace.
func openProcess(pid int, runtime *proc.Process, h host.Host) (*process, error) {
	if pid <= 1 {
		return nil, fmt.Errorf("the state has the process ID %d, which no container's process has on the host", pid)
	}
	p := &process{runtime: runtime}
	if err := p.open(pid, h); err != nil {
		p.close()
		return nil, fmt.Errorf("process %d of the state: %w", pid, err)
	}
	return p, nil
}

func (p *process) open(pid int, h host.Host) (err error) {
	if p.Process, err = proc.Open(h.Proc(), pid); err != nil {
		return err
	}
	if err := p.checkAlive(); err != nil {
		return err
	}
	if err := p.checkCreatedBy(h); err != nil {
		return err
	}
	self, err := proc.Self(h.Proc())
	if err != nil {
		return err
	}
	defer self.Close()
	if err := p.openMounts(self); err != nil {
		return err
	}
	return p.readUsers(self)
}

// openMounts opens the mount namespaces of the process and of this hook, and returns an error if they are the same.
// Later, container.check proves that container.path is this container's root.
func (p *process) openMounts(self *proc.Process) (err error) {
	if p.mounts, err = p.OpenNamespace("mnt"); err != nil {
		return err
	}
	if p.own, err = self.OpenNamespace("mnt"); err != nil {
		return err
	}
	if p.hostRoot, err = os.Stat("/"); err != nil {
		return err
	}
	own, err := p.own.Stat()
	if err != nil {
		return err
	}
	info, err := p.mounts.Stat()
	if err != nil {
		return err
	}
	if os.SameFile(info, own) {
		return errors.New("it is in the mount namespace of this hook: the container has none of its own, " +
			"or the runtime runs hooks inside it")
	}
	return nil
}

// readUsers reads whether the process has a user namespace of its own, and the mappings of that namespace.
func (p *process) readUsers(self *proc.Process) error {
	if !self.In(proc.InitialUser) {
		return errors.New("this hook runs in a user namespace, where no device nodes can be made: " +
			"a rootless engine cannot use it")
	}
	users, err := p.Namespace("user")
	if err != nil {
		return err
	}
	p.hasUsers = users != proc.InitialUser
	if p.uid, err = p.UIDMap(); err != nil {
		return err
	}
	p.gid, err = p.GIDMap()
	return err
}

func (p *process) close() {
	if p.Process != nil {
		p.Close()
	}
	for _, f := range []*os.File{p.mounts, p.own} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// checkAlive returns an error if the process or its runtime has ended.
func (p *process) checkAlive() error {
	if err := p.CheckRunning(); err != nil {
		return err
	}
	if err := p.runtime.CheckRunning(); err != nil {
		return fmt.Errorf("the runtime that made it: %w", err)
	}
	return nil
}

// checkCreatedBy returns an error unless the runtime made the process: the process is a child of the runtime, or a
// grandchild that lost its parent, since "crun create" with a user namespace forks twice. The kernel gives such an
// orphan to an ancestor of the runtime, which can be the parent of other containers' processes too. So two more
// conditions must be met: the process executes the runtime's program, and did not start before the runtime.
func (p *process) checkCreatedBy(h host.Host) error {
	own, err := p.Stat()
	if err != nil {
		return err
	}
	if own.Parent == p.runtime.PID {
		return nil
	}
	theirs, err := p.runtime.Stat()
	if err != nil {
		return err
	}
	same, err := p.SameExecutable(p.runtime)
	if err != nil {
		return fmt.Errorf("compare its program with the runtime's: %w", err)
	}
	isAncestor, err := isAncestor(own.Parent, theirs.Parent, h)
	if err != nil {
		return err
	}
	if p.PID == p.runtime.PID || !same || !isAncestor || own.Start < theirs.Start {
		return fmt.Errorf("it is a child of process %d, and this hook of process %d: only the runtime that made the "+
			"container may run the hook, without a shell between them", own.Parent, p.runtime.PID)
	}
	return nil
}

// maxAncestors bounds the walk from a process to the first one.
const maxAncestors = 1000

// isAncestor reports whether a process is the descendant itself or one of its ancestors.
func isAncestor(pid, descendant int, h host.Host) (bool, error) {
	for range maxAncestors {
		if pid == descendant {
			return true, nil
		}
		if descendant <= 1 {
			return false, nil
		}
		parent, err := parentOf(descendant, h)
		if err != nil {
			return false, err
		}
		descendant = parent
	}
	return false, nil
}

func parentOf(pid int, h host.Host) (int, error) {
	p, err := proc.Open(h.Proc(), pid)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	s, err := p.Stat()
	return s.Parent, err
}
