package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/host"
)

// Snapshot reads all GPUs and how they are linked.
//
// A GPU that cannot be read is in the snapshot with its error, and not in a link; so is one whose links cannot be read.
// The error that Snapshot returns is about the driver as a whole, with an exit status and a hint. If that is
// [ErrNoDevices] the snapshot is there too, without devices; with any other error it is nil. When ctx ends first, its
// cause is the error.
func (l *Library) Snapshot(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	s, err := l.Devices(ctx, h)
	if err != nil {
		return s, err
	}
	links, unread := l.Links(ctx, h, s)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("read the links of the GPUs: %w", context.Cause(ctx))
	}
	for i, err := range unread {
		s.Devices[i].Error = err.Error()
	}
	s.Links = slices.DeleteFunc(links, func(l gpu.Link) bool { return !s.Devices[l.A].Usable() || !s.Devices[l.B].Usable() })
	return s, nil
}

// Devices is [Library.Snapshot] without links, for a sixth of the driver calls on a machine with NVSwitches.
func (l *Library) Devices(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	if l.closed.Load() {
		return nil, errClosed
	}
	s, count, err := l.system(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the driver: %w", err)
	}
	if count == 0 {
		return s, exit.With(exit.NoGPU, hintNoDevices, ErrNoDevices)
	}
	readings := l.readAll(ctx, count)
	readCaps(readings, h)
	for i := range readings {
		s.Devices = append(s.Devices, readings[i].device(i, h))
	}
	l.identify(ctx, s.Devices, h)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("read the GPUs: %w", context.Cause(ctx))
	}
	return s, nil
}

// Links reads how the GPUs of a snapshot are linked that [Library.Devices] could read: an entry for each two. About the
// GPUs in unread, by index, the driver does not say all; what it said last about them counts, and a path on PCIe that it
// never said is that of sysfs.
func (l *Library) Links(ctx context.Context, h host.Host, s *gpu.Snapshot) (links []gpu.Link, unread map[int]error) {
	ctx, cancel := context.WithTimeout(ctx, l.patience())
	defer cancel()
	handles := make([]nvml.Device, len(s.Devices))
	for i := range s.Devices {
		if got, ok := l.driver.answers.get(gpuTask(i)).(reading); ok && s.Devices[i].Usable() {
			handles[i] = got.handle
		}
	}
	nvlinks, errs := make([][]nvlink, len(handles)), make([]error, len(handles))
	var paths map[pair]pathAnswer
	var all sync.WaitGroup
	for i, handle := range handles {
		if handle != nil {
			all.Go(func() { nvlinks[i], errs[i] = l.readNVLinks(ctx, i, handle) })
		}
	}
	all.Go(func() { paths = l.readPaths(ctx, handles) })
	all.Wait()
	unread = blame(paths)
	for i, err := range errs {
		if err != nil {
			unread[i] = err
		}
	}
	return combineLinks(s.Devices, nvlinks, paths, h), unread
}

// system reads what is about no GPU, and how many GPUs there are. The first time it is worth a long wait, since nothing
// can be done without it.
func (l *Library) system(ctx context.Context) (*gpu.Snapshot, int, error) {
	patience := l.patience()
	if l.driver.answers.get(driverTask) == nil {
		patience = l.timeout
	}
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	got, err := read(waiting, l, driverTask, l.driver.readSystem)
	if err != nil && ctx.Err() != nil {
		return nil, 0, context.Cause(ctx)
	}
	s := got.Snapshot
	return &s, got.count, systemError(err)
}

// system is what the driver says about itself: a snapshot without GPUs, and their number.
type system struct {
	gpu.Snapshot
	count int
}

func (d *driver) readSystem(t *task) (s system, err error) {
	if s.DriverVersion, err = ask(d, t, "nvmlSystemGetDriverVersion", d.api.SystemGetDriverVersion); err != nil {
		return s, err
	}
	if s.count, err = ask(d, t, "nvmlDeviceGetCount", d.api.DeviceGetCount); err != nil {
		return s, err
	}
	// Nothing but forward compatibility depends on CUDA's version, so a driver that does not say it is not refused.
	cuda, err := ask(d, t, "nvmlSystemGetCudaDriverVersion", d.api.SystemGetCudaDriverVersion)
	if err == nil {
		s.CUDAVersion = cudaVersion(cuda)
	}
	return s, nil
}

// cudaVersion writes NVML's number, 1000*major + 10*minor, as people do.
func cudaVersion(n int) string { return fmt.Sprintf("%d.%d", n/1000, n%1000/10) }

// readAll reads the GPUs, all at a time.
func (l *Library) readAll(ctx context.Context, count int) []reading {
	ctx, cancel := context.WithTimeout(ctx, l.patience())
	defer cancel()
	readings := make([]reading, count)
	var all sync.WaitGroup
	for i := range readings {
		all.Go(func() { readings[i] = l.readGPU(ctx, i) })
	}
	all.Wait()
	return readings
}
