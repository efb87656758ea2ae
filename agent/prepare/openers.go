package prepare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
)

// openers lists the processes that have one of the device nodes open, such as "process 4711 (nv-hostengine, cgroup
// /system.slice/nvidia-dcgm.service)", sorted by PID and without the excepted PIDs. It returns an error if a path is
// not a device node, if processes could not be inspected, or if ctx has ended.
func openers(ctx context.Context, h host.Host, nodes []string, except ...int) ([]string, error) {
	if err := proc.SeesAll(h); err != nil {
		return nil, err
	}
	pids, err := proc.PIDs(h)
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
	var list []string
	for _, pid := range pids {
		if slices.Contains(except, pid) {
			continue
		}
		open, err := hasNodeOpen(h, pid, nodes, numbers)
		if err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if open {
			list = append(list, opener(h, pid)...)
		}
	}
	return list, nil
}

// opener describes a process, or returns nothing if it has ended.
func opener(h host.Host, pid int) []string {
	if pid == os.Getpid() {
		return []string{fmt.Sprintf("process %d (this program)", pid)}
	}
	p, err := proc.Open(h, pid)
	if err != nil {
		return nil
	}
	defer p.Close()
	return []string{describe(p)}
}

// hasNodeOpen reports whether a process has one of the nodes open. It compares device numbers, because a path proves
// nothing: any user can have a file of that name in their own mount namespace.
func hasNodeOpen(h host.Host, pid int, nodes []string, numbers map[uint64]bool) (bool, error) {
	dir := h.Proc(strconv.Itoa(pid), "fd")
	fds, err := os.ReadDir(dir)
	if err != nil {
		if errors.Is(proc.Error(err), proc.ErrEnded) {
			return false, nil
		}
		return false, err
	}
	for _, fd := range fds {
		path := filepath.Join(dir, fd.Name())
		target, err := os.Readlink(path)
		if err != nil {
			continue // the file was closed meanwhile
		}
		named := func(node string) bool { return filepath.Base(node) == filepath.Base(target) }
		if !strings.HasPrefix(target, "/dev/") && !slices.ContainsFunc(nodes, named) {
			continue // true of most files
		}
		// Network file systems answer from their cache, so this does not wait for an unreachable server.
		var st unix.Statx_t
		err = unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && numbers[unix.Mkdev(st.Rdev_major, st.Rdev_minor)] &&
			!onlyPath(h.Proc(strconv.Itoa(pid), "fdinfo", fd.Name())) {
			return true, nil
		}
	}
	return false, nil
}

// onlyPath reports, from the fdinfo of a file (proc_pid_fdinfo(5)), whether it was opened with O_PATH, which neither
// opens the device nor needs permission for it.
func onlyPath(fdinfo string) bool {
	text, _ := os.ReadFile(fdinfo)
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(value), 8, 64)
			return err == nil && flags&unix.O_PATH != 0
		}
	}
	return false
}
