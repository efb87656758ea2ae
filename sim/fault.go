package sim

import (
	"fmt"
	"regexp"
	"slices"
	"time"

	"gpu-cdi-plugin/gpu"
)

// AnyGPU and AnyFunction make a call fault hold for every GPU or every function.
const (
	AnyGPU      = -1
	AnyFunction = "*"
)

// maxFaults is the number of call faults that the library keeps; maxLatency is the longest latency that it obeys.
const (
	maxFaults  = 256
	maxLatency = time.Minute
)

var functionPattern = regexp.MustCompile(`^nvml[A-Z][A-Za-z0-9]*(_v[0-9]+)?$`)

// Lose makes a GPU fall off the bus: it is still counted, and every call on it answers NVML_ERROR_GPU_IS_LOST.
func (n *Node) Lose(gpu int) error { return n.gpuFault(gpu, "lost") }

// Remove takes a GPU out of the enumeration; the GPUs behind it get other indices. Its files stay.
func (n *Node) Remove(gpu int) error { return n.gpuFault(gpu, "gone") }

func (n *Node) gpuFault(gpu int, kind string) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	return n.addFault(rec("fault", "gpu", gpu, "kind", kind), func(r record) bool {
		_, ok := r.get("kind")
		return ok && r.is("gpu", gpu)
	})
}

// Fail makes a function of the library fail with an nvmlReturn_t, for one GPU or AnyGPU.
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
	f := rec("fault", "function", function)
	if gpu != AnyGPU {
		if err := n.checkGPU(gpu); err != nil {
			return err
		}
		f.pairs = append(f.pairs, pair{"gpu", fmt.Sprint(gpu)})
	}
	f.pairs = append(f.pairs, effect)
	return n.addFault(f, func(r record) bool { return r.is("function", function) && sameGPU(r, f) })
}

func sameGPU(a, b record) bool {
	x, hasX := a.get("gpu")
	y, hasY := b.get("gpu")
	return x == y && hasX == hasY
}

// addFault adds a fault in place of one that says something else about the same.
func (n *Node) addFault(f record, replaces func(record) bool) error {
	return n.change(func(records []record) ([]record, error) {
		records = without(records, func(r record) bool { return r.name == "fault" && replaces(r) })
		if len(records) >= maxFaults {
			return nil, fmt.Errorf("the node has %d faults already; clear some", len(records))
		}
		return append(records, f), nil
	})
}

// Latency makes every call to the driver take that long, at most a minute; 0 ends it.
func (n *Node) Latency(d time.Duration) error {
	if d < 0 || d > maxLatency {
		return invalid("latency %v: want 0 to %v", d, maxLatency)
	}
	return n.change(func(records []record) ([]record, error) {
		records = without(records, isLatency)
		if d > 0 {
			records = append(records, rec("latency", "ns", d.Nanoseconds()))
		}
		return records, nil
	})
}

// Clear ends all faults; the node is as it was made, MIG and kernel version included.
func (n *Node) Clear() error {
	if err := n.change(func([]record) ([]record, error) { return nil, nil }); err != nil {
		return err
	}
	if err := n.writeKernelVersion(n.driver); err != nil {
		return err
	}
	for i := range n.machine.GPUs {
		if err := n.replaceMIGNodes(&n.machine.GPUs[i]); err != nil {
			return err
		}
	}
	return nil
}

// ClearGPU ends the faults of one GPU and gives it back the MIG devices that it was made with.
func (n *Node) ClearGPU(gpu int) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	err := n.change(func(records []record) ([]record, error) {
		return without(records, func(r record) bool {
			return isMIG(r, gpu) || r.name == "fault" && r.is("gpu", gpu)
		}), nil
	})
	if err != nil {
		return err
	}
	return n.replaceMIGNodes(&n.machine.GPUs[gpu])
}

func (n *Node) checkGPU(index int) error {
	if last := len(n.machine.GPUs) - 1; index < 0 || index > last {
		return invalid("no GPU %d: machine %s has GPUs 0 to %d", index, n.machine.Name, last)
	}
	return nil
}

// Faults lists what has been changed since the node was made, one line each, as the state file has it.
func (n *Node) Faults() ([]string, error) {
	records, err := n.state()
	if err != nil {
		return nil, err
	}
	lines := []string{}
	for _, r := range records {
		lines = append(lines, r.String())
	}
	return lines, nil
}

// Snapshot is what the product has to read from the node in its present state: the oracle for tests. Lost GPUs and
// failing calls are not in it, since what is left of such a GPU is the product's choice; GPUs that are gone are.
func (n *Node) Snapshot() (*gpu.Snapshot, error) {
	records, err := n.state()
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
		if slices.ContainsFunc(records, func(r record) bool { return r.is("kind", "gone") && r.is("gpu", i) }) {
			s = dropDevice(s, i)
		}
	}
	return s, nil
}

// dropDevice takes a device out and renumbers those behind it.
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
