package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is a line of /proc/PID/mountinfo: proc_pid_mountinfo(5).
type mount struct {
	id uint64
	// dev is the file system, such as "0:45", and root the directory of it that is mounted at point.
	dev, root, point string
	// shared tells that others see what is mounted below, and slave that this one sees what others mount.
	shared, slave bool
	kind, source  string
}

const (
	// maxMountLine bounds a line, in bytes. It has two paths, each byte of which may be written as four.
	maxMountLine = 1 << 16
	// maxMounts bounds what is read at once of the mounts of all processes, in bytes. It is what some ten thousand
	// containers have.
	maxMounts = 256 << 20
)

// parseMounts leaves out lines that are too long. Everybody who has a user namespace can make some, and would keep us from
// reading the others; what a containers' runtime mounts has shorter paths.
func parseMounts(r io.Reader) ([]mount, error) {
	var list []mount
	lines, long := bufio.NewReaderSize(r, maxMountLine), false
	for {
		line, goesOn, err := lines.ReadLine()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		if !goesOn && !long {
			m, err := parseMount(string(line))
			if err != nil {
				return nil, err
			}
			list = append(list, m)
		}
		long = goesOn
	}
}

func parseMount(line string) (mount, error) {
	before, after, ok := strings.Cut(line, " - ")
	own, tail := strings.Fields(before), strings.Fields(after)
	if !ok || len(own) < 6 || len(tail) < 2 {
		return mount{}, fmt.Errorf("not the line of a mount: %s", excerpt(line))
	}
	id, err := strconv.ParseUint(own[0], 10, 64)
	if err != nil {
		return mount{}, fmt.Errorf("not the line of a mount: %s", excerpt(line))
	}
	m := mount{
		id: id, dev: own[2], root: unescaped.Replace(own[3]), point: unescaped.Replace(own[4]),
		kind: tail[0], source: unescaped.Replace(tail[1]),
	}
	for _, field := range own[6:] {
		m.shared = m.shared || strings.HasPrefix(field, "shared:")
		m.slave = m.slave || strings.HasPrefix(field, "master:")
	}
	return m, nil
}

// unescaped are the bytes that mountinfo writes as numbers: they would end a field or a line, or begin such a number.
var unescaped = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)

func readMounts(path string) ([]mount, error) {
	var left int64 = maxMounts
	return readMountsUpTo(path, &left)
}

// readMountsUpTo reads no more than is left of a number of bytes, which it lessens.
func readMountsUpTo(path string, left *int64) ([]mount, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := &io.LimitedReader{R: f, N: *left}
	list, err := parseMounts(r)
	*left = r.N
	if err == nil && r.N <= 0 {
		err = fmt.Errorf("more than %d bytes are mounts", maxMounts)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return list, nil
}

// place is where a directory is.
type place struct {
	path  string // without links
	mount mount  // that it is in
	root  string // its path in the file system
	top   bool   // it is what is mounted there
}

// locate finds out where an open directory is.
func locate(dir *os.File) (place, error) {
	path, err := os.Readlink(inProc(dir))
	if err != nil {
		return place{}, err
	}
	st, err := mountOf(dir)
	if err != nil {
		return place{}, err
	}
	list, err := readMounts("/proc/thread-self/mountinfo")
	if err != nil {
		return place{}, err
	}
	for _, m := range list {
		if m.id != st.Mnt_id {
			continue
		}
		below, err := filepath.Rel(m.point, path)
		if err != nil || !filepath.IsLocal(below) {
			return place{}, fmt.Errorf("%s is not below %s, where it is mounted", path, m.point)
		}
		return place{path: path, mount: m, root: filepath.Join(m.root, below), top: isTop(st)}, nil
	}
	return place{}, fmt.Errorf("the mount that %s is in is not known", path)
}

func mountOf(dir *os.File) (*unix.Statx_t, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return nil, &os.PathError{Op: "statx", Path: dir.Name(), Err: err}
	}
	return &st, nil
}

func isTop(st *unix.Statx_t) bool { return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 }

// initialPIDs is the first namespace of processes: PROC_PID_INIT_INO in the kernel's proc_ns.h. Who is in it sees every
// process of the machine.
const initialPIDs = "pid:[4026531836]"

func seesAllProcesses() bool {
	ns, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && ns == initialPIDs
}

// used reports whether a container, or a daemon, has the directory mounted elsewhere than where it is. It is known only to
// who sees all processes.
func (p place) used() (used, known bool) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil || !seesAllProcesses() {
		return false, false
	}
	seen := map[view]bool{}
	var left int64 = maxMounts
	for _, process := range processes {
		v, err := viewOf(process)
		if err == nil && seen[v] {
			continue
		}
		list, err := readMountsUpTo(process+"/mountinfo", &left) // which more may read than where the namespace is
		switch {
		case hasEnded(err):
			continue
		case err != nil:
			return false, false
		case p.isIn(list):
			return true, true
		}
		seen[v] = true
	}
	return false, true
}

// view is what a process sees mounted: a mount namespace, and the directory in it that is the process's root. One that is
// in a chroot is shown nothing that is mounted elsewhere.
type view struct{ namespace, root string }

func viewOf(process string) (v view, err error) {
	if v.namespace, err = os.Readlink(process + "/ns/mnt"); err != nil {
		return view{}, err
	}
	v.root, err = os.Readlink(process + "/root")
	return v, err
}

// hasEnded reports whether an error of /proc/PID is that of a process that has ended.
func hasEnded(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL)
}

// isIn reports whether mounts show the directory under another path than its own. Under that it is where the host's mounts
// are, perhaps below another directory.
func (p place) isIn(list []mount) bool {
	for _, m := range list {
		if m.dev == p.mount.dev && (p.top || m.root == p.root) && !strings.HasSuffix(m.point, p.path) {
			return true
		}
	}
	return false
}

// onHost reports whether what was mounted at the place is what the host's programs see there. In is the mount that it is
// in. A mount that is made in a pod, or in a service of systemd with PrivateTmp= and the like, may stay there.
func (p place) onHost(in mount) bool {
	if !seesAllProcesses() {
		return in.reachesHost()
	}
	list, err := readMounts("/proc/1/mountinfo")
	if err != nil {
		return false
	}
	for _, m := range list {
		if m.dev == p.mount.dev && m.point == p.path {
			return true
		}
	}
	return false
}

// reachesHost reports whether what is mounted below is seen on the host, as far as can be told without its processes: in a
// pod only where it is shared, and everywhere in a container that has nothing mounted from the host, which is a node itself.
// A slave, as all is in a service of systemd with mounts of its own, sees what others mount and keeps its own to itself.
func (m mount) reachesHost() bool { return !m.slave && (m.shared || m.point == "/") }
