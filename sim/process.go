package sim

import (
	"errors"
	"fmt"
	"slices"

	"gpu-cdi-plugin/internal/proc"
)

// maxProcesses is how many processes the library reads.
const maxProcesses = 256

// ProcessType is the driver's list that contains a process.
type ProcessType string

// The driver's lists of processes.
const (
	ComputeProcess  ProcessType = "compute"
	GraphicsProcess ProcessType = "graphics"
	MPSProcess      ProcessType = "mps"
)

// Process is a running process that uses a GPU. The driver lists it until it ends.
type Process struct {
	PID         int
	Type        ProcessType
	MemoryBytes uint64
	// Instance is the MIG device that the process uses, or nil.
	Instance *Instance
}

// AddProcess makes a running process use a GPU. It replaces the process's earlier use of it.
func (n *Node) AddProcess(gpu int, p Process) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	if !slices.Contains([]ProcessType{ComputeProcess, GraphicsProcess, MPSProcess}, p.Type) {
		return invalid("process type %q: want compute, graphics or mps", p.Type)
	}
	if total := n.machine.GPUs[gpu].MemoryBytes; p.MemoryBytes > total {
		return invalid("%d bytes of memory: GPU %d has %d", p.MemoryBytes, gpu, total)
	}
	if p.Instance != nil {
		if err := n.checkInstance(gpu, *p.Instance); err != nil {
			return err
		}
	}
	stat, err := statOf(p.PID)
	switch {
	case errors.Is(err, proc.ErrEnded):
		return invalid("no process %d runs", p.PID)
	case err != nil:
		return fmt.Errorf("read when process %d was started: %w", p.PID, err)
	}
	fields := append([]any{"gpu", gpu, "pid", p.PID, "start", stat.Start}, "type", p.Type, "memory", p.MemoryBytes)
	return n.updateState(func(records []record) ([]record, error) {
		records = without(records, func(r record) bool { return r.name == "process" && !runs(r) })
		records = withoutProcess(records, gpu, p.PID)
		for _, name := range []string{"process", "account"} {
			r := newRecord(name, fields...)
			r.pairs = append(r.pairs, p.Instance.pairs()...)
			if name == "process" || valuesOf(records, gpu)[accountingMode] != 0 {
				records = append(records, r)
			}
		}
		if len(records)-len(without(records, func(r record) bool { return r.name == "process" })) > maxProcesses {
			return nil, invalid("more than %d processes on the GPUs", maxProcesses)
		}
		return records, nil
	})
}

// RemoveProcess ends a process's use of a GPU, as if it had closed the device.
func (n *Node) RemoveProcess(gpu, pid int) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	return n.updateState(func(records []record) ([]record, error) {
		left := withoutProcess(records, gpu, pid)
		if len(left) == len(records) {
			return nil, invalid("process %d is not on GPU %d", pid, gpu)
		}
		return left, nil
	})
}

// PIDs returns the IDs of the processes that the driver lists on a GPU.
func (n *Node) PIDs(gpu int) ([]int, error) {
	if err := n.checkGPU(gpu); err != nil {
		return nil, err
	}
	records, err := n.readState()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, r := range records {
		if r.name == "process" && r.has("gpu", gpu) && runs(r) {
			pid, err := r.number("pid")
			if err != nil {
				return nil, err
			}
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// runs reports whether the process of a record runs, as process_runs of the library does. A zombie does not.
func runs(r record) bool {
	pid, err := r.number("pid")
	if err != nil {
		return false
	}
	s, err := statOf(pid)
	return err == nil && s.State != "Z" && s.State != "X" && r.has("start", s.Start)
}

func withoutProcess(records []record, gpu, pid int) []record {
	return without(records, func(r record) bool {
		return r.name == "process" && r.has("gpu", gpu) && r.has("pid", pid)
	})
}

// statOf returns the state of a process, and its start time, which distinguishes it from a later one with the same PID.
func statOf(pid int) (proc.Stat, error) {
	p, err := proc.Open("/proc", pid)
	if err != nil {
		return proc.Stat{}, err
	}
	defer p.Close()
	return p.Stat()
}
