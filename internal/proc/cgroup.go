package proc

import (
	"slices"
	"strings"
)

// Cgroups are a process's cgroups, one for each hierarchy, in the order of /proc/PID/cgroup.
type Cgroups []cgroup

// cgroup is a process's cgroup in one hierarchy.
type cgroup struct {
	// hierarchy is the number and the controllers, such as "4:memory", or "0:" for version 2.
	hierarchy string
	// path begins with a slash. It is relative to this process's cgroup namespace, so it may begin with "/..".
	path string
}

// parseCgroups parses /proc/PID/cgroup (cgroups(7)). Malformed lines are ignored.
func parseCgroups(text string) Cgroups {
	var list Cgroups
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 || !strings.HasPrefix(parts[2], "/") {
			continue
		}
		path := strings.TrimSuffix(parts[2], " (deleted)") // the cgroup of a zombie process
		list = append(list, cgroup{parts[0] + ":" + parts[1], path})
	}
	return list
}

// isContainer reports whether a name is that of a container's cgroup: the 64 hexadecimal digits of a container ID of
// containerd, CRI-O, docker or podman, by themselves or as in "cri-containerd-ID.scope".
func isContainer(name string) bool {
	id := strings.TrimSuffix(name, ".scope")
	end := strings.LastIndexByte(id, '-') + 1
	prefix, id := id[:end], id[end:]
	return prefix != "-" && strings.Trim(prefix, "abcdefghijklmnopqrstuvwxyz-") == "" &&
		len(id) == 64 && strings.Trim(id, "0123456789abcdef") == ""
}

// InContainer reports whether the path of a cgroup contains a container's or a pod's name. Some runtimes use other
// names.
func (c Cgroups) InContainer() bool { return slices.ContainsFunc(c, cgroup.inContainer) }

func (c cgroup) inContainer() bool {
	return slices.ContainsFunc(strings.Split(c.path, "/"), func(name string) bool {
		return isContainer(name) || strings.Contains(name, "kubepods") || slices.ContainsFunc(
			[]string{"docker", "libpod", "lxc", "machine"},
			func(prefix string) bool { return strings.HasPrefix(name, prefix) })
	})
}

// String returns the path that identifies the process best: a container's, otherwise the longest.
func (c Cgroups) String() string {
	best := cgroup{path: "/"}
	for _, one := range c {
		if a, b := one.inContainer(), best.inContainer(); a && !b || a == b && len(one.path) > len(best.path) {
			best = one
		}
	}
	return best.path
}
