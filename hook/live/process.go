package live

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
)

// Runtime is the process that runs this hook.
type Runtime struct {
	pid   int
	pidfd *os.File
}

// OpenRuntime opens the parent of this process. Call it first: if the parent ends, another process becomes the parent,
// such as process 1, which is the parent of many.
func OpenRuntime() (*Runtime, error) { return openRuntime(os.Getppid()) }

func openRuntime(pid int) (*Runtime, error) {
	if pid <= 1 {
		return nil, fmt.Errorf("the parent of this hook is process %d: the runtime that ran it has ended", pid)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("pidfd_open of the runtime, process %d: %w", pid, err)
	}
	return &Runtime{pid: pid, pidfd: os.NewFile(uintptr(fd), "runtime")}, nil
}

// Close closes the handle.
func (r *Runtime) Close() { _ = r.pidfd.Close() }

// process is the first process of a container, which waits for the runtime's hooks. It is read only through its
// directory in /proc, which stays that of the process even if its ID is reused.
type process struct {
	pid     int
	runtime *Runtime
	pidfd   *os.File
	dir     *os.File
	// mounts is the mount namespace of the process, and own that of this process.
	mounts, own *os.File
	// users is the user namespace of the process, or nil if that is the host's.
	users    *os.File
	uid, gid idMap
	// hostRoot is the root directory of this process.
	hostRoot fs.FileInfo
}

// initialUserNamespace is the inode number of the initial user namespace, USER_NS_INIT_INO of linux/nsfs.h.
const initialUserNamespace = 0xEFFFFFFD

// openProcess opens the process with an ID. The runtime must have created it, and it must have its own mount
// namespace.
func openProcess(pid int, runtime *Runtime, h host.Host) (*process, error) {
	if pid <= 1 {
		return nil, fmt.Errorf("the state has the process ID %d, not the container's on the host", pid)
	}
	p := &process{pid: pid, runtime: runtime}
	if err := p.open(h); err != nil {
		p.close()
		return nil, fmt.Errorf("process %d of the state: %w", pid, err)
	}
	return p, nil
}

func (p *process) open(h host.Host) error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return fmt.Errorf("pidfd_open: %w", err)
	}
	p.pidfd = os.NewFile(uintptr(fd), "pidfd")
	if p.dir, err = openProc(p.pid, h); err != nil {
		return err
	}
	// A running process keeps its ID, so the directory is that of the process behind the pidfd.
	if err := p.checkAlive(); err != nil {
		return err
	}
	if err := p.checkCreatedBy(h); err != nil {
		return err
	}
	if err := p.openMounts(h); err != nil {
		return err
	}
	return p.openUsers(h)
}

// openMounts opens the mount namespace. The check of the container's root proves that it is not the host's.
func (p *process) openMounts(h host.Host) (err error) {
	if p.mounts, err = openFile(p.dir, "ns/mnt"); err != nil {
		return err
	}
	if p.own, err = os.Open(h.Proc("thread-self", "ns", "mnt")); err != nil {
		return err
	}
	if p.hostRoot, err = os.Stat("/"); err != nil {
		return err
	}
	own, ownErr := p.own.Stat()
	info, err := p.mounts.Stat()
	switch {
	case errors.Join(err, ownErr) != nil:
		return errors.Join(err, ownErr)
	case os.SameFile(info, own):
		return errors.New("it is in the mount namespace of this hook: the container has none of its own, " +
			"or the runtime runs hooks inside it")
	}
	return nil
}

// openUsers opens the user namespace and reads its mappings, unless it is the host's.
func (p *process) openUsers(h host.Host) error {
	own, err := os.Open(h.Proc("thread-self", "ns", "user"))
	if err != nil {
		return err
	}
	defer own.Close()
	users, err := openFile(p.dir, "ns/user")
	if err != nil {
		return err
	}
	ownID, err := inode(own)
	if err != nil {
		return errors.Join(err, users.Close())
	}
	id, err := inode(users)
	if err != nil {
		return errors.Join(err, users.Close())
	}
	if id == ownID {
		_ = users.Close()
	} else {
		p.users = users
	}
	if ownID != initialUserNamespace {
		return errors.New("this hook runs in a user namespace, where no device nodes can be made: " +
			"a rootless engine cannot use it")
	}
	if p.uid, err = readMap(p.dir, "uid_map"); err != nil {
		return err
	}
	p.gid, err = readMap(p.dir, "gid_map")
	return err
}

func inode(f *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	return st.Ino, nil
}

func (p *process) close() {
	for _, f := range []*os.File{p.pidfd, p.dir, p.mounts, p.own, p.users} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// checkAlive returns an error if the process or its runtime has ended.
func (p *process) checkAlive() error {
	fds := []unix.PollFd{
		{Fd: int32(p.pidfd.Fd()), Events: unix.POLLIN}, {Fd: int32(p.runtime.pidfd.Fd()), Events: unix.POLLIN},
	}
	if _, err := unix.Poll(fds, 0); err != nil {
		return fmt.Errorf("ask whether it still runs: %w", err)
	}
	switch {
	case fds[0].Revents != 0:
		return errors.New("it has ended")
	case fds[1].Revents != 0:
		return errors.New("the runtime that made it has ended")
	}
	return nil
}

// checkCreatedBy returns an error unless the process is a child of the runtime, or a grandchild that lost its parent:
// "crun create" with a user namespace forks twice. The kernel gives such an orphan to an ancestor of the runtime.
// Processes of other containers can have the same parent, so two more conditions must be met: the process executes the
// runtime's program, and did not start before the runtime.
func (p *process) checkCreatedBy(h host.Host) error {
	runtime := p.runtime.pid
	own, err := readStat(p.dir)
	if err != nil {
		return err
	}
	if own.parent == runtime {
		return nil
	}
	creator, err := openProc(runtime, h)
	if err != nil {
		return err
	}
	defer creator.Close()
	theirs, err := readStat(creator)
	if err != nil {
		return err
	}
	same, err := sameProgram(p.dir, creator)
	if err != nil {
		return err
	}
	isAncestor, err := isAncestor(own.parent, theirs.parent, h)
	if err != nil {
		return err
	}
	if p.pid == runtime || !same || !isAncestor || own.start < theirs.start {
		return fmt.Errorf("it is a child of process %d, and this hook of process %d: only the runtime that made the "+
			"container may run the hook, without a shell between them", own.parent, runtime)
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
		dir, err := openProc(descendant, h)
		if err != nil {
			return false, err
		}
		s, err := readStat(dir)
		_ = dir.Close()
		if err != nil {
			return false, err
		}
		descendant = s.parent
	}
	return false, nil
}

// sameProgram reports whether two processes execute the same file.
func sameProgram(a, b *os.File) (bool, error) {
	var x, y unix.Stat_t
	err := errors.Join(unix.Fstatat(int(a.Fd()), "exe", &x, 0), unix.Fstatat(int(b.Fd()), "exe", &y, 0))
	if err != nil {
		return false, fmt.Errorf("compare its program with the runtime's: %w", err)
	}
	return x.Dev == y.Dev && x.Ino == y.Ino, nil
}

// openProc opens the directory of a process in /proc.
func openProc(pid int, h host.Host) (*os.File, error) {
	return os.OpenFile(h.Proc(strconv.Itoa(pid)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

func openFile(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir.Name() + "/" + name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// maxProcFile bounds a file of /proc, in bytes. A mapping has at most 340 lines.
const maxProcFile = 1 << 20

func readFile(dir *os.File, name string) ([]byte, error) {
	f, err := openFile(dir, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxProcFile))
}

// stat has fields of a process' stat file (proc_pid_stat(5)).
type stat struct {
	parent int
	start  uint64 // in clock ticks since the boot
}

func readStat(dir *os.File) (stat, error) {
	data, err := readFile(dir, "stat")
	if err != nil {
		return stat{}, err
	}
	return parseStat(string(data))
}

// parseStat parses fields 4 and 22. Field 2 is the program's name in parentheses, which may contain any characters.
func parseStat(text string) (s stat, err error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return s, errors.New("its stat file has no start time")
	}
	if s.parent, err = strconv.Atoi(fields[1]); err != nil {
		return s, err
	}
	s.start, err = strconv.ParseUint(fields[19], 10, 64)
	return s, err
}

// idMap has the lines of a uid_map or gid_map (user_namespaces(7)).
type idMap []idRange

type idRange struct{ inside, outside, size uint64 }

func readMap(dir *os.File, name string) (idMap, error) {
	data, err := readFile(dir, name)
	if err != nil {
		return nil, err
	}
	m, err := parseMap(string(data))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return m, nil
}

func parseMap(text string) (idMap, error) {
	var m idMap
	for line := range strings.Lines(text) {
		var r idRange
		if _, err := fmt.Sscan(line, &r.inside, &r.outside, &r.size); err != nil {
			return nil, fmt.Errorf("line %q: want three numbers", strings.TrimSpace(line))
		}
		m = append(m, r)
	}
	return m, nil
}

// hasRoot reports whether the host's ID 0 is mapped.
func (m idMap) hasRoot() bool {
	return slices.ContainsFunc(m, func(r idRange) bool { return r.outside == 0 && r.size > 0 })
}

// host returns the host's ID for an ID in the container.
func (m idMap) host(id uint32) (int, error) {
	for _, r := range m {
		if n := uint64(id); n >= r.inside && n-r.inside < r.size {
			return int(r.outside + n - r.inside), nil
		}
	}
	return 0, fmt.Errorf("ID %d of the container is not mapped to one of the host", id)
}
