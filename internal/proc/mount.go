package proc

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Mount is a mount in a process's mount namespace.
type Mount struct {
	// ID is unique on the machine while the mount exists.
	ID uint64
	// Device is the number of the file system's device, as stat returns it.
	Device uint64
	// Point is the mount point relative to the process's root. Spaces and some other bytes are octal, such as \040.
	Point string
	// Shared means that mounts on it propagate to other mount namespaces.
	Shared bool
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
		m, err := parseMount(strings.TrimSuffix(line, "\n"))
		if err != nil {
			return nil, fmt.Errorf("mountinfo of a process: line %q: %w", line, err)
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

func parseMount(line string) (m Mount, err error) {
	// ID, parent, device, root, mount point, options, any number of optional fields, "-", and more
	before, _, found := strings.Cut(line, " - ")
	fields := strings.Split(before, " ")
	if !found || len(fields) < 6 {
		return Mount{}, fmt.Errorf("want 6 fields before a dash, got %d", len(fields))
	}
	if m.ID, err = strconv.ParseUint(fields[0], 10, 64); err != nil {
		return Mount{}, fmt.Errorf("mount ID: %w", err)
	}
	if m.Device, err = parseDevice(fields[2]); err != nil {
		return Mount{}, err
	}
	m.Point = fields[4]
	for _, optional := range fields[6:] {
		m.Shared = m.Shared || strings.HasPrefix(optional, "shared:")
	}
	return m, nil
}

func parseDevice(text string) (uint64, error) {
	majorText, minorText, _ := strings.Cut(text, ":")
	major, err := strconv.ParseUint(majorText, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("major number: %w", err)
	}
	minor, err := strconv.ParseUint(minorText, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("minor number: %w", err)
	}
	return unix.Mkdev(uint32(major), uint32(minor)), nil
}
