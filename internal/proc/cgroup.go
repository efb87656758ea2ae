package proc

import (
	"fmt"
	"slices"
	"strings"
)

// Cgroups are a process's cgroups, one for each hierarchy, in the order of /proc/PID/cgroup.
type Cgroups []Cgroup

// Cgroup is a process's cgroup in one hierarchy.
type Cgroup struct {
	// Controllers are the controllers of the hierarchy, with cgroup v1.
	Controllers []string
	// Unified means that the hierarchy is that of cgroup v2.
	Unified bool
	// Path begins with a slash. It is relative to this process's cgroup namespace, so it may begin with "/..".
	Path string
}

// Cgroups reads the process's cgroups.
func (p *Process) Cgroups() (Cgroups, error) {
	text, err := p.read("cgroup")
	if err != nil {
		return nil, err
	}
	return parseCgroups(text)
}

// parseCgroups parses /proc/PID/cgroup (cgroups(7)).
func parseCgroups(text string) (Cgroups, error) {
	var list Cgroups
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 || !strings.HasPrefix(fields[2], "/") {
			return nil, fmt.Errorf("the cgroups of a process have an unexpected line: %q", line)
		}
		list = append(list, Cgroup{
			Controllers: strings.Split(fields[1], ","),
			Unified:     fields[0] == "0" && fields[1] == "",
			Path:        strings.TrimSuffix(fields[2], " (deleted)"), // the cgroup of a zombie process
		})
	}
	return list, nil
}

// isContainer reports whether the name of a cgroup is a container's. containerd, CRI-O, docker and podman use the
// container's ID, 64 hexadecimal digits, or a name like "cri-containerd-ID.scope".
func isContainer(name string) bool {
	id := strings.TrimSuffix(name, ".scope")
	end := strings.LastIndexByte(id, '-') + 1
	prefix, id := id[:end], id[end:]
	return prefix != "-" && strings.Trim(prefix, "abcdefghijklmnopqrstuvwxyz-") == "" &&
		len(id) == 64 && strings.Trim(id, "0123456789abcdef") == ""
}

// InContainer reports whether one of the cgroups' paths has the name of a container or a pod. It does not know the
// names that some other runtimes use.
func (c Cgroups) InContainer() bool { return slices.ContainsFunc(c, Cgroup.inContainer) }

func (c Cgroup) inContainer() bool {
	names := strings.Split(c.Path, "/")
	if last := len(names) - 1; strings.HasPrefix(names[last], "libpod-conmon-") {
		// The monitor of a podman container is a program of the host, in the slice of all its containers.
		names = slices.DeleteFunc(names[:last], func(name string) bool { return name == "machine.slice" })
	}
	return slices.ContainsFunc(names, func(name string) bool {
		return isContainer(name) || strings.Contains(name, "kubepods") || slices.ContainsFunc(
			[]string{"docker", "libpod", "lxc", "machine"},
			func(prefix string) bool { return strings.HasPrefix(name, prefix) })
	})
}

// String returns the path that identifies the process best: that of a container, otherwise the longest.
func (c Cgroups) String() string {
	best := Cgroup{Path: "/"}
	for _, one := range c {
		if a, b := one.inContainer(), best.inContainer(); a && !b || a == b && len(one.Path) > len(best.Path) {
			best = one
		}
	}
	return best.Path
}
