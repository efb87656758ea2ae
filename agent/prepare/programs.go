package prepare

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
)

// describe names a process for people: its PID, command, user and cgroup.
func describe(h host.Host, p *proc.Process) string {
	what := []string{plain(p.Command())}
	groups, unknown := p.Cgroups()
	if s, err := p.Status(); err == nil {
		name := ""
		if unknown == nil && !groups.InContainer() { // a container has users of its own
			name = userName(h, s.UIDs[0])
		}
		if name == "" {
			what = append(what, "UID "+s.UIDs[0])
		} else {
			what = append(what, "user "+plain(name))
		}
	}
	if unknown == nil {
		what = append(what, "cgroup "+plain(groups.String()))
	}
	return fmt.Sprintf("process %d (%s)", p.PID, strings.Join(what, ", "))
}

// maxPasswd bounds /etc/passwd, in bytes.
const maxPasswd = 1 << 20

// userName returns the name of a user in a host's /etc/passwd (passwd(5)), or "".
func userName(h host.Host, uid string) string {
	text, err := fileio.ReadFile(filepath.Join(h.Root(), "etc", "passwd"), maxPasswd)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Split(line, ":"); len(fields) > 2 && fields[2] == uid {
			return fields[0]
		}
	}
	return ""
}

// DefaultPrograms are programs that may use a GPU although a container is about to get it: display servers, and
// NVIDIA's daemons and tools.
func DefaultPrograms() []string {
	return []string{
		"Xorg", "Xorg.bin", "Xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "gdm-x-session",
		"nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "dcgmi", "nv-fabricmanager", "nvidia-imex",
		"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-powerd", "nvsm_core",
	}
}

// known reports whether the process is one of the programs, by the name of its executable, and the name can be
// trusted. A container can run a program of any name as root, so a known process must also be one of these:
//   - a process of the host: in no container's cgroup, and in the PID and user namespaces of the host. A container in
//     these namespaces that can write to the host's cgroups can leave its own, and then passes for the host;
//   - root with CAP_SYS_ADMIN in the host's user namespace, like a monitoring agent in a container. Such a
//     container has full control of the node already, so trusting the name grants it nothing.
func known(p *proc.Process, programs []string) bool {
	name, err := p.Executable()
	if err != nil || !slices.Contains(programs, name) || !p.In(proc.InitialUser) {
		return false
	}
	if ofHost(p) && p.In(proc.InitialPID) {
		return true
	}
	s, err := p.Status()
	root := err == nil && !slices.ContainsFunc(s.UIDs, func(uid string) bool { return uid != "0" })
	return root && s.Capabilities&(1<<unix.CAP_SYS_ADMIN) != 0
}

// ofHost reports whether the process is in no container's cgroup.
func ofHost(p *proc.Process) bool {
	groups, err := p.Cgroups()
	return err == nil && len(groups) > 0 && !groups.InContainer()
}
