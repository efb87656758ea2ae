package prepare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
)

// openers lists the processes that have one of the device nodes open, sorted by PID, except those that `skip` reports.
// An entry is a text such as "process 4711 (nv-hostengine, user root, cgroup /system.slice/nvidia-dcgm.service)". It
// returns an error if a path is not a device node, if processes could not be inspected, or if ctx has ended.
func openers(ctx context.Context, h host.Host, nodes []string, skip func(*proc.Process) bool) ([]string, error) {
	if err := proc.SeesAll(h.Proc()); err != nil {
		return nil, err
	}
	pids, err := proc.PIDs(h.Proc())
	if err != nil {
		return nil, err
	}
	numbers, names := map[uint64]bool{}, make([]string, len(nodes))
	for i, node := range nodes {
		var st unix.Stat_t
		switch err := unix.Stat(node, &st); {
		case err != nil:
			return nil, &os.PathError{Op: "stat", Path: node, Err: err}
		case st.Mode&unix.S_IFMT != unix.S_IFCHR:
			return nil, fmt.Errorf("%s is not a device node", node)
		}
		numbers[st.Rdev], names[i] = true, filepath.Base(node)
	}
	var list []string
	for _, pid := range pids {
		name, err := opener(h, pid, numbers, names, skip)
		if err != nil && !errors.Is(err, proc.ErrEnded) {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if name != "" {
			list = append(list, name)
		}
	}
	return list, nil
}

// thisProgram reports whether a process is this one.
func thisProgram(p *proc.Process) bool { return p.PID == os.Getpid() }

// skipNone is for callers to whom every process counts, also this one.
func skipNone(*proc.Process) bool { return false }

// opener describes a process if it has one of the devices open. Otherwise it returns "".
func opener(
	h host.Host, pid int, numbers map[uint64]bool, names []string, skip func(*proc.Process) bool,
) (string, error) {
	p, err := proc.Open(h.Proc(), pid)
	if err != nil {
		return "", err
	}
	defer p.Close()
	open, err := p.HasOpen(numbers, names)
	switch {
	case err != nil || !open || skip(p):
		return "", err
	case pid == os.Getpid():
		return fmt.Sprintf("process %d (this program)", pid), nil
	}
	return describe(h, p), nil
}
