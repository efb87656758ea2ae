package proc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// The host's namespaces, with which the kernel starts. Their numbers are fixed (linux/nsfs.h, PID_NS_INIT_INO and
// USER_NS_INIT_INO).
const (
	InitialPID  = "pid:[4026531836]"
	InitialUser = "user:[4026531837]"
)

// Namespace returns the name of the process's namespace of a kind, such as "mnt:[4026531841]" for "mnt". No two
// namespaces have the same name at the same time.
func (p *Process) Namespace(kind string) (string, error) { return p.readlink("ns/" + kind) }

// OpenNamespace opens the process's namespace of a kind, such as "mnt".
func (p *Process) OpenNamespace(kind string) (*os.File, error) {
	return p.openat("ns/"+kind, unix.O_RDONLY)
}

// In reports whether the process is in a namespace of the host, [InitialPID] or [InitialUser].
func (p *Process) In(namespace string) bool {
	kind, _, _ := strings.Cut(namespace, ":")
	name, err := p.Namespace(kind)
	return err == nil && name == namespace
}

// OwnerOfMounts returns the name of the user namespace that owns the process's mount namespace. It fails if this
// process is in a user namespace below that one: the kernel then does not give the name.
func (p *Process) OwnerOfMounts() (string, error) {
	owner, err := p.openOwnerOfMounts()
	if err != nil {
		return "", err
	}
	defer owner.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(owner.Fd()), &st); err != nil {
		return "", fmt.Errorf("stat the owner of the mount namespace: %w", err)
	}
	return fmt.Sprintf("user:[%d]", st.Ino), nil
}

// UserOfMounts returns the user who made the user namespace that owns the process's mount namespace. For the host's
// that is root. It fails like OwnerOfMounts.
func (p *Process) UserOfMounts() (int, error) {
	owner, err := p.openOwnerOfMounts()
	if err != nil {
		return 0, err
	}
	defer owner.Close()
	uid, err := unix.IoctlGetUint32(int(owner.Fd()), unix.NS_GET_OWNER_UID)
	if err != nil {
		return 0, fmt.Errorf("get the user of the mount namespace: %w", err)
	}
	return int(uid), nil
}

func (p *Process) openOwnerOfMounts() (*os.File, error) {
	mounts, err := p.OpenNamespace("mnt")
	if err != nil {
		return nil, err
	}
	defer mounts.Close()
	fd, err := unix.IoctlRetInt(int(mounts.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		return nil, fmt.Errorf("get the owner of the mount namespace: %w", err)
	}
	return os.NewFile(uintptr(fd), "user namespace"), nil
}

// ErrNotHost means that this process cannot see all processes of the host.
var ErrNotHost = errors.New("this program does not run in the host's PID namespace")

// SeesAll returns nil if this process sees all processes of the host, and ErrNotHost if it does not. Other errors mean
// that this is unknown.
func SeesAll(procfs string) error {
	self, err := Self(procfs)
	if err != nil {
		return err
	}
	defer self.Close()
	own, err := self.Namespace("pid")
	if err != nil {
		return err
	}
	if own != InitialPID {
		return ErrNotHost
	}
	return nil
}

// IDMap has the lines of a uid_map or gid_map (user_namespaces(7)). It is empty as long as none was written.
type IDMap []idRange

type idRange struct{ inside, outside, size uint64 }

// UIDMap reads the user IDs of the process's user namespace.
func (p *Process) UIDMap() (IDMap, error) { return p.idMap("uid_map") }

// GIDMap reads the group IDs of the process's user namespace.
func (p *Process) GIDMap() (IDMap, error) { return p.idMap("gid_map") }

func (p *Process) idMap(name string) (IDMap, error) {
	text, err := p.read(name)
	if err != nil {
		return nil, err
	}
	m, err := parseIDMap(text)
	if err != nil {
		return nil, fmt.Errorf("%s of a process: %w", name, err)
	}
	return m, nil
}

// parseIDMap parses a uid_map or gid_map.
func parseIDMap(text string) (IDMap, error) {
	var m IDMap
	for line := range strings.Lines(text) {
		var r idRange
		if _, err := fmt.Sscan(line, &r.inside, &r.outside, &r.size); err != nil {
			return nil, fmt.Errorf("line %q: want three numbers", strings.TrimSpace(line))
		}
		m = append(m, r)
	}
	return m, nil
}

// HasRoot reports whether the host's user or group 0 is in the map.
func (m IDMap) HasRoot() bool {
	return slices.ContainsFunc(m, func(r idRange) bool { return r.outside == 0 && r.size > 0 })
}

// Host returns the ID on the host for an ID in the user namespace.
func (m IDMap) Host(id uint32) (int, error) {
	for _, r := range m {
		if n := uint64(id); n >= r.inside && n-r.inside < r.size {
			return int(r.outside + n - r.inside), nil
		}
	}
	return 0, fmt.Errorf("ID %d of the container is not mapped to one of the host", id)
}
