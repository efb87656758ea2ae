package proc

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Mount is a mount in a process's mount namespace.
type Mount struct {
	// ID is unique on the machine while the mount exists.
	ID uint64
	// Device is the major and minor number of the file system's device, such as "0:26".
	Device string
	// Root is what is mounted, as a path in its file system. A file that was deleted ends with "//deleted".
	Root string
	// Point is the mount point relative to the process's root. Spaces and some other bytes are octal, such as \040.
	Point string
	// Shared means that new mounts below this mount propagate to other mount namespaces, and Slave that those of others
	// propagate to it.
	Shared, Slave bool
}

// Mounts reads the mounts of the process's mount namespace that can be reached from its root.
func (p *Process) Mounts() ([]Mount, error) {
	text, err := p.read("mountinfo", maxMounts)
	if err != nil {
		return nil, err
	}
	return parseMounts(text)
}

// parseMounts parses /proc/PID/mountinfo (proc_pid_mountinfo(5)).
func parseMounts(text string) ([]Mount, error) {
	var mounts []Mount
	for line := range strings.Lines(text) {
		// ID, parent, device, root, mount point, options, any number of optional fields, "-", and more
		before, _, hasDash := strings.Cut(line, " - ")
		fields := strings.Split(before, " ")
		if !hasDash || len(fields) < 6 {
			return nil, fmt.Errorf("mountinfo of a process has an unexpected line: %q", line)
		}
		id, err := strconv.ParseUint(fields[0], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("mountinfo of a process has no mount ID in line %q: %w", line, err)
		}
		has := func(tag string) bool {
			return slices.ContainsFunc(fields[6:], func(f string) bool { return strings.HasPrefix(f, tag) })
		}
		mounts = append(mounts, Mount{
			ID: id, Device: fields[2], Root: fields[3], Point: fields[4], Shared: has("shared:"), Slave: has("master:"),
		})
	}
	return mounts, nil
}
