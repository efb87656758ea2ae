package proc

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// HasOpen reports whether the process has one of the character devices open. `devices` are the numbers of the devices,
// as stat returns them, and `names` the last elements of their paths. Names are not enough: any user can have a file
// with such a name in a mount namespace of their own.
func (p *Process) HasOpen(devices map[uint64]bool, names []string) (bool, error) {
	dir, err := p.openat("fd", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	fds, err := dir.Readdirnames(-1)
	if err != nil {
		return false, asEnded(err)
	}
	for _, fd := range fds {
		target, _ := p.readlink("fd/" + fd) // "" if the file was closed meanwhile
		if !strings.HasPrefix(target, "/dev/") && !slices.Contains(names, filepath.Base(target)) {
			continue // most files end here
		}
		// statx with AT_STATX_DONT_SYNC asks no file server, so this does not wait for one that cannot be reached.
		var st unix.Statx_t
		err = unix.Statx(int(p.dir.Fd()), "fd/"+fd, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR &&
			devices[unix.Mkdev(st.Rdev_major, st.Rdev_minor)] && !p.isOnlyPath(fd) {
			return true, nil
		}
	}
	return false, nil
}

// isOnlyPath reports whether a file was opened with O_PATH. That does not open the device, and needs no permission for
// it.
func (p *Process) isOnlyPath(fd string) bool {
	value, err := p.FDInfo(fd, "flags")
	if err != nil {
		return false
	}
	flags, err := strconv.ParseUint(value, 8, 64)
	return err == nil && flags&unix.O_PATH != 0
}

// FDInfo returns a value of an open file of the process (proc_pid_fdinfo(5)), such as its "flags", or "" if the kernel
// does not report it.
func (p *Process) FDInfo(fd, key string) (string, error) {
	text, err := p.read("fdinfo/" + fd)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ":"); ok && name == key {
			return strings.TrimSpace(value), nil
		}
	}
	return "", nil
}
