package nvml

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// Use reads what uses a GPU or MIG device, given by its UUID. Snapshots do not wait for this call.
func (s *Session) Use(ctx context.Context, uuid string) (gpu.Use, error) {
	use, err := withLibrary(ctx, s, "use of "+uuid, func(l *library, c *call) (gpu.Use, error) {
		dev, err := l.deviceByUUID(c, uuid)
		if err != nil {
			return gpu.Use{}, err
		}
		return l.use(c, dev)
	})
	if err != nil {
		return gpu.Use{}, fmt.Errorf("read what uses %s: %w", uuid, err)
	}
	return use, nil
}

func (l *library) deviceByUUID(c *call, uuid string) (nvml.Device, error) {
	return invoke(l, c, "nvmlDeviceGetHandleByUUID", func() (nvml.Device, nvml.Return) {
		return l.api.DeviceGetHandleByUUID(uuid)
	})
}

const computeProcesses = "nvmlDeviceGetComputeRunningProcesses"

func (l *library) use(c *call, dev nvml.Device) (gpu.Use, error) {
	var use gpu.Use
	byPID := map[int]gpu.Process{}
	for _, kind := range []struct {
		function string
		list     func() ([]nvml.ProcessInfo, nvml.Return)
		mark     func(*gpu.Process)
	}{
		{
			computeProcesses, dev.GetComputeRunningProcesses,
			func(p *gpu.Process) { p.Compute = true },
		},
		{
			"nvmlDeviceGetGraphicsRunningProcesses", dev.GetGraphicsRunningProcesses,
			func(p *gpu.Process) { p.Graphics = true },
		},
		{
			"nvmlDeviceGetMPSComputeRunningProcesses", dev.GetMPSComputeRunningProcesses,
			func(p *gpu.Process) { p.MPS = true },
		},
	} {
		found, err := invoke(l, c, kind.function, kind.list)
		switch {
		case isNotSupported(err): // drivers that report any processes report those with a compute context
			use.ProcessesUnknown = use.ProcessesUnknown || kind.function == computeProcesses
		case err != nil:
			return gpu.Use{}, err
		}
		for _, p := range found {
			memory := p.UsedGpuMemory
			if memory == math.MaxUint64 { // NVML's value for "not available"
				memory = 0
			}
			process := byPID[int(p.Pid)]
			process.PID, process.MemoryBytes = int(p.Pid), max(memory, process.MemoryBytes)
			kind.mark(&process)
			byPID[process.PID] = process
		}
	}
	var err error
	if use.MemoryUsed, err = l.memoryUsed(c, dev); isNotSupported(err) {
		use.MemoryUnknown, err = true, nil
	}
	if err != nil {
		return gpu.Use{}, err
	}
	for _, p := range byPID {
		use.Processes = append(use.Processes, p)
	}
	slices.SortFunc(use.Processes, func(a, b gpu.Process) int { return cmp.Compare(a.PID, b.PID) })
	return use, nil
}

// memoryUsed returns the memory in use, without what the driver reserves. Drivers before 510 have only the first
// version of the function. With them it excludes reserved memory; with later drivers it includes that memory.
func (l *library) memoryUsed(c *call, dev nvml.Device) (uint64, error) {
	memory, err := invoke(l, c, "nvmlDeviceGetMemoryInfo_v2", dev.GetMemoryInfo_v2)
	if !isNotSupported(err) {
		return memory.Used, err
	}
	first, err := invoke(l, c, "nvmlDeviceGetMemoryInfo", dev.GetMemoryInfo)
	return first.Used, err
}

// withLibrary calls the driver about a subject, with the library open. Snapshots do not wait for the call.
func withLibrary[T any](
	ctx context.Context, s *Session, subject string, work func(*library, *call) (T, error),
) (T, error) {
	s.mu.Lock()
	err := s.open(ctx)
	l := s.library
	s.users.Add(1) // under mu, so that the library is not closed
	s.mu.Unlock()
	defer func() {
		if s.users.Add(-1) == 0 && s.unbinding.due() && s.changed != nil {
			s.changed()
		}
	}()
	if err != nil {
		var none T
		return none, err
	}
	waiting, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	return ask(waiting, &l.calls, subject, 0, func(c *call) (T, error) { return work(l, c) })
}
