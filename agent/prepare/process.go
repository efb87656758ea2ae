package prepare

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
)

// maxProcFile bounds what is read of a file in /proc/PID, in bytes.
const maxProcFile = 64 << 10

// process is an open directory /proc/PID. It belongs to one process for ever: once that has ended, every access fails,
// also if the PID is in use again.
type process struct {
	pid int
	dir *os.Root
}

// errEnded reports that there is no such process, or that it has ended.
var errEnded = errors.New("the process has ended")

func openProcess(h host.Host, pid int) (*process, error) {
	dir, err := os.OpenRoot(h.Proc(strconv.Itoa(pid)))
	if err != nil {
		return nil, procError(err)
	}
	return &process{pid, dir}, nil
}

func (p *process) close() { _ = p.dir.Close() }

// procError wraps what /proc returns for a process that has ended with errEnded.
func procError(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("%w: %w", errEnded, err)
	}
	return err
}

func (p *process) read(name string) (string, error) {
	f, err := p.dir.Open(name)
	if err != nil {
		return "", procError(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxProcFile))
	return string(text), procError(err)
}

// status is what /proc/PID/status (proc_pid_status(5)) has of a process.
type status struct {
	// uids are the real, effective, saved and file system user ID.
	uids []string
	// capabilities are the effective ones, in the process's user namespace.
	capabilities uint64
}

func parseStatus(text string) (status, error) {
	var s status
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		if len(fields) == 0 {
			continue
		}
		var err error
		switch key {
		case "Uid":
			s.uids = fields
		case "CapEff":
			s.capabilities, err = strconv.ParseUint(fields[0], 16, 64)
		default:
			continue
		}
		if err != nil {
			return status{}, fmt.Errorf("%s of a process: %w", key, err)
		}
		seen[key] = true
	}
	if len(seen) != 2 {
		return status{}, errors.New("the status of a process is not complete")
	}
	return s, nil
}

func (p *process) status() (status, error) {
	text, err := p.read("status")
	if err != nil {
		return status{}, err
	}
	return parseStatus(text)
}

func (p *process) cgroups() (cgroups, error) {
	text, err := p.read("cgroup")
	return parseCgroups(text), err
}

// command is the name of the process, which it can choose.
func (p *process) command() string {
	text, err := p.read("comm")
	if name := strings.TrimSuffix(text, "\n"); err == nil && name != "" {
		return name
	}
	return "unknown command"
}

// String names the process for people: its PID, command and cgroup.
func (p *process) String() string {
	groups, err := p.cgroups()
	if err != nil {
		return fmt.Sprintf("process %d (%s)", p.pid, plain(p.command()))
	}
	return fmt.Sprintf("process %d (%s, cgroup %s)", p.pid, plain(p.command()), plain(groups.String()))
}

// DefaultPrograms are the programs that may use a GPU that is about to be given to a container: display servers,
// NVIDIA's daemons and its tools.
func DefaultPrograms() []string {
	return []string{
		"Xorg", "Xorg.bin", "Xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "gdm-x-session",
		"nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "dcgmi", "nv-fabricmanager", "nvidia-imex",
		"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-powerd", "nvsm_core",
	}
}

// known reports whether the process is one of the programs, by the name of its executable, and may be trusted to be: a
// container can have a program of any name, and run it as root. So a known process is one of
//   - a process of the host: in no container's cgroup, and in the PID and user namespaces of the host;
//   - root with CAP_SYS_ADMIN in the host's user namespace, as monitoring agents have in their containers. Such a
//     container can do whatever it likes on the node, so the name gives it nothing that it does not have.
func (p *process) known(programs []string) bool {
	program, err := p.dir.Readlink("exe")
	if err != nil || !slices.Contains(programs, path.Base(strings.TrimSuffix(program, " (deleted)"))) {
		return false
	}
	if !p.hasNamespace("user", initialUser) {
		return false
	}
	if p.ofHost() && p.hasNamespace("pid", initialPID) {
		return true
	}
	s, err := p.status()
	root := err == nil && !slices.ContainsFunc(s.uids, func(uid string) bool { return uid != "0" })
	return root && s.capabilities&(1<<unix.CAP_SYS_ADMIN) != 0
}

// ofHost reports whether the process is in no container's cgroup.
func (p *process) ofHost() bool {
	groups, err := p.cgroups()
	return err == nil && len(groups) > 0 && !groups.inContainer()
}

// The namespaces that the kernel begins with, which are the host's. Their numbers are fixed (linux/nsfs.h,
// PID_NS_INIT_INO and USER_NS_INIT_INO).
const (
	initialPID  = "pid:[4026531836]"
	initialUser = "user:[4026531837]"
)

func (p *process) hasNamespace(kind, want string) bool {
	link, err := p.dir.Readlink("ns/" + kind)
	return err == nil && link == want
}

// errNotHost reports that this process does not see all processes of the host.
var errNotHost = errors.New("this program does not run in the host's PID namespace")

// seesAll returns an error unless this process sees all processes of the host.
func seesAll(h host.Host) error {
	own, err := os.Readlink(h.Proc("self", "ns", "pid"))
	if err == nil && own != initialPID {
		err = errNotHost
	}
	return err
}
