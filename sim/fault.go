package sim

import (
	"fmt"
	"regexp"
	"slices"
	"time"

	"gpu-cdi-plugin/gpu"
)

// AnyGPU and AnyFunction apply a fault to every GPU or every function.
const (
	AnyGPU      = -1
	AnyFunction = "*"
)

// Limits of the library: the number of faults, and the longest latency.
const (
	maxFaults  = 256
	maxLatency = time.Minute
)

var functionPattern = regexp.MustCompile(`^nvml[A-Z][A-Za-z0-9]*(_v[0-9]+)?$`)

// Lose makes a GPU fall off the bus: the driver still counts it, and every call on it returns NVML_ERROR_GPU_IS_LOST.
func (n *Node) Lose(gpu int) error { return n.gpuFault(gpu, "lost") }

// Remove removes a GPU from the enumeration, so that the indices of later GPUs change. Its files stay.
func (n *Node) Remove(gpu int) error { return n.gpuFault(gpu, kindGone) }

func (n *Node) gpuFault(gpu int, kind string) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	return n.updateState(func(records []record) ([]record, error) {
		if now := detached(records)[gpu]; now != "" {
			return nil, invalid("GPU %d is %s", gpu, now)
		}
		return replaceFault(records, newRecord("fault", "gpu", gpu, "kind", kind),
			func(r record) bool { return isKind(r, gpu) })
	})
}

// Fail makes a function of the library return an nvmlReturn_t, for one GPU or AnyGPU.
func (n *Node) Fail(function string, gpu, result int) error {
	if result < 0 || result > 999 {
		return invalid("return value %d: an nvmlReturn_t is 0 to 999", result)
	}
	return n.callFault(function, gpu, pair{"return", fmt.Sprint(result)})
}

// Hang makes a function of the library block, for one GPU or AnyGPU, until the fault is cleared.
func (n *Node) Hang(function string, gpu int) error {
	return n.callFault(function, gpu, pair{"hang", "1"})
}

func (n *Node) callFault(function string, gpu int, effect pair) error {
	if function != AnyFunction && !functionPattern.MatchString(function) {
		return invalid("%q is not the name of an NVML function, such as nvmlDeviceGetUUID", function)
	}
	f := newRecord("fault", "function", function)
	if gpu != AnyGPU {
		if err := n.checkGPU(gpu); err != nil {
			return err
		}
		f.pairs = append(f.pairs, pair{"gpu", fmt.Sprint(gpu)})
	}
	f.pairs = append(f.pairs, effect)
	wantGPU, wantOne := f.get("gpu")
	return n.addFault(f, func(r record) bool {
		oldGPU, oldOne := r.get("gpu")
		return r.has("function", function) && oldGPU == wantGPU && oldOne == wantOne
	})
}

// addFault adds a fault and removes the faults that it replaces.
func (n *Node) addFault(f record, replaces func(record) bool) error {
	return n.updateState(func(records []record) ([]record, error) { return replaceFault(records, f, replaces) })
}

func replaceFault(records []record, f record, replaces func(record) bool) ([]record, error) {
	records = without(records, func(r record) bool { return r.name == "fault" && replaces(r) })
	faults := len(records) - len(without(records, func(r record) bool { return r.name == "fault" }))
	if faults >= maxFaults {
		return nil, fmt.Errorf("the node has %d faults, which is the most; clear some", faults)
	}
	return append(records, f), nil
}

// SetLatency makes every call to the driver take the given time, at most a minute; 0 clears the fault.
func (n *Node) SetLatency(d time.Duration) error {
	if d < 0 || d > maxLatency {
		return invalid("latency %v: want 0 to %v", d, maxLatency)
	}
	return n.updateState(func(records []record) ([]record, error) {
		records = without(records, func(r record) bool { return r.name == "latency" })
		if d > 0 {
			records = append(records, newRecord("latency", "ns", d.Nanoseconds()))
		}
		return records, nil
	})
}

// Clear clears all faults and events, and restores the node's original MIG devices and kernel version. GPUs that were
// unbound or unplugged return as with Bind and Plug.
func (n *Node) Clear() error {
	var back map[int]string
	err := n.updateState(func(records []record) (left []record, _ error) {
		back = detached(records)
		for gpu := range back {
			left = addEvent(left, systemEvent(gpu, systemBind))
		}
		return left, nil
	})
	if err != nil {
		return err
	}
	if err := n.writeKernelVersion(n.driver); err != nil {
		return err
	}
	for i := range n.machine.GPUs {
		if err := n.restoreFiles(&n.machine.GPUs[i], back[i]); err != nil {
			return err
		}
	}
	return nil
}

// ClearGPU clears the faults, the changed values and the processes of a GPU, and restores its original MIG devices.
func (n *Node) ClearGPU(gpu int) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	var back string
	err := n.updateState(func(records []record) ([]record, error) {
		back = detached(records)[gpu]
		left := without(records, func(r record) bool {
			return isMIG(r, gpu) || r.has("gpu", gpu) &&
				slices.Contains([]string{"fault", "set", "process", "account"}, r.name)
		})
		if back != "" {
			left = addEvent(left, systemEvent(gpu, systemBind))
		}
		return left, nil
	})
	if err != nil {
		return err
	}
	return n.restoreFiles(&n.machine.GPUs[gpu], back)
}

// restoreFiles restores the files of a GPU that faults change. If the GPU was detached, back is how.
func (n *Node) restoreFiles(g *GPU, back string) error {
	if back != "" {
		if err := n.restore(g); err != nil {
			return err
		}
	}
	if err := n.makeResetFile(g, ResetWorks); err != nil {
		return err
	}
	return n.replaceMIGNodes(g)
}

func (n *Node) checkGPU(index int) error {
	if last := len(n.machine.GPUs) - 1; index < 0 || index > last {
		return invalid("no GPU %d: machine %s has GPUs 0 to %d", index, n.machine.Name, last)
	}
	return nil
}

// Faults returns the changes since the node was created, as the lines of the state file.
func (n *Node) Faults() ([]string, error) {
	records, err := n.readState()
	if err != nil {
		return nil, err
	}
	lines := []string{}
	for _, r := range records {
		lines = append(lines, r.String())
	}
	return lines, nil
}

// Snapshot returns the snapshot that must be read from the node in its present state, as an oracle for tests. It does
// not have GPUs that are gone. Lost GPUs and failing calls have no effect on it: what a program keeps of such a GPU is
// for the test to decide.
func (n *Node) Snapshot() (*gpu.Snapshot, error) {
	records, err := n.readState()
	if err != nil {
		return nil, err
	}
	m := *n.machine
	m.GPUs = slices.Clone(m.GPUs)
	for i := range m.GPUs {
		if err := applyMIG(&m.GPUs[i], records); err != nil {
			return nil, err
		}
	}
	s := m.Snapshot(n.driver)
	for i := range slices.Backward(m.GPUs) {
		if slices.Contains([]string{kindGone, kindUnbound, kindUnplugged}, kindOf(records, i)) {
			s = dropDevice(s, i)
		}
	}
	return s, nil
}

// dropDevice removes a device and renumbers those after it.
func dropDevice(s *gpu.Snapshot, index int) *gpu.Snapshot {
	s.Devices = slices.Delete(s.Devices, index, index+1)
	for i := range s.Devices {
		s.Devices[i].Index = i
	}
	s.Links = slices.DeleteFunc(s.Links, func(l gpu.Link) bool { return l.A == index || l.B == index })
	for i := range s.Links {
		for _, end := range []*int{&s.Links[i].A, &s.Links[i].B} {
			if *end > index {
				*end--
			}
		}
	}
	return s
}
