package prestart

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
)

// holders lists the processes that have one of the device nodes open, such as "process 4711 (nv-hostengine, cgroup
// /system.slice/nvidia-dcgm.service)", sorted by PID, without those that are excepted. The error is that a path is no
// device node or that processes could not be inspected.
func holders(h host.Host, nodes []string, except ...int) ([]string, error) {
	if err := seesAll(h); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(h.Proc())
	if err != nil {
		return nil, err
	}
	numbers := map[uint64]bool{}
	for _, node := range nodes {
		var st unix.Stat_t
		switch err := unix.Stat(node, &st); {
		case err != nil:
			return nil, &os.PathError{Op: "stat", Path: node, Err: err}
		case st.Mode&unix.S_IFMT != unix.S_IFCHR:
			return nil, fmt.Errorf("%s is no device node", node)
		}
		numbers[st.Rdev] = true
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || slices.Contains(except, pid) {
			continue
		}
		holds, err := holdsAny(h, pid, nodes, numbers)
		if err != nil {
			return nil, err
		}
		if holds {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	var list []string
	for _, pid := range pids {
		p, err := openProcess(h, pid)
		if err != nil {
			continue
		}
		name := p.String()
		p.close()
		if pid == os.Getpid() {
			name = fmt.Sprintf("process %d (this program)", pid)
		}
		list = append(list, name)
	}
	return list, nil
}

// holdsAny reports whether a process has one of the nodes open, by its path or, since containers may have it elsewhere
// in /dev, by its device numbers.
func holdsAny(h host.Host, pid int, nodes []string, numbers map[uint64]bool) (bool, error) {
	dir := h.Proc(strconv.Itoa(pid), "fd")
	fds, err := os.ReadDir(dir)
	if err != nil {
		if errors.Is(procError(err), errEnded) {
			return false, nil
		}
		return false, err
	}
	for _, fd := range fds {
		path := filepath.Join(dir, fd.Name())
		target, err := os.Readlink(path)
		if err != nil {
			continue // closed meanwhile
		}
		if slices.Contains(nodes, target) {
			return true, nil
		}
		var st unix.Stat_t // of other files it could wait, as on a network's file system
		if strings.HasPrefix(target, "/dev/") && unix.Stat(path, &st) == nil &&
			st.Mode&unix.S_IFMT == unix.S_IFCHR && numbers[st.Rdev] {
			return true, nil
		}
	}
	return false, nil
}
