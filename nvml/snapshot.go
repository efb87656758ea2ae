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
// A GPU that cannot be read is in the snapshot with its error, and not in a link. The error that Snapshot returns is
// about the driver as a whole, with an exit status and a hint. If that is [ErrNoDevices] the snapshot is there too,
// without devices; with any other error it is nil. When ctx ends first, its cause is the error.
func (l *Library) Snapshot(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	return l.snapshot(ctx, h, true)
}

// Devices is [Library.Snapshot] without links, for a sixth of the driver calls on a machine with NVSwitches.
func (l *Library) Devices(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	return l.snapshot(ctx, h, false)
}

func (l *Library) snapshot(ctx context.Context, h host.Host, links bool) (*gpu.Snapshot, error) {
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
	readings := l.readAll(ctx, count, links)
	readCaps(readings, h)
	if links {
		s.Links = l.links(ctx, readings)
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("read the GPUs: %w", context.Cause(ctx))
	}
	for i := range readings {
		s.Devices = append(s.Devices, readings[i].device(i, h))
	}
	locate(s.Devices, h)
	return s, nil
}

// system reads what is about no GPU, and how many GPUs there are.
func (l *Library) system(ctx context.Context) (*gpu.Snapshot, int, error) {
	waiting, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	s, count, err := l.driver.readSystem(waiting)
	if err != nil && ctx.Err() != nil {
		return nil, 0, context.Cause(ctx)
	}
	return s, count, systemError(err)
}

func (d *driver) readSystem(ctx context.Context) (*gpu.Snapshot, int, error) {
	version, err := askSystem(ctx, d, "nvmlSystemGetDriverVersion", d.api.SystemGetDriverVersion)
	if err != nil {
		return nil, 0, err
	}
	count, err := askSystem(ctx, d, "nvmlDeviceGetCount", d.api.DeviceGetCount)
	if err != nil {
		return nil, 0, err
	}
	s := &gpu.Snapshot{DriverVersion: version}
	// Nothing but forward compatibility depends on CUDA's version, so a driver that does not say it is not refused.
	cuda, err := askSystem(ctx, d, "nvmlSystemGetCudaDriverVersion", d.api.SystemGetCudaDriverVersion)
	if err == nil {
		s.CUDAVersion = cudaVersion(cuda)
	}
	return s, count, nil
}

// cudaVersion writes NVML's number, 1000*major + 10*minor, as people do.
func cudaVersion(n int) string { return fmt.Sprintf("%d.%d", n/1000, n%1000/10) }

// readAll reads the GPUs, all at a time.
func (l *Library) readAll(ctx context.Context, count int, links bool) []reading {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	readings := make([]reading, count)
	var all sync.WaitGroup
	for i := range readings {
		all.Go(func() { readings[i] = l.driver.readGPU(ctx, i, links) })
	}
	all.Wait()
	return readings
}

// links reads the PCIe paths between the GPUs that could be read and makes the links. A GPU that fails then gets its
// error into its reading.
func (l *Library) links(ctx context.Context, readings []reading) []gpu.Link {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	handles := make([]nvml.Device, len(readings))
	for i := range readings {
		if readings[i].err == nil {
			handles[i] = readings[i].handle
		}
	}
	answers := l.driver.readPaths(ctx, handles)
	for i, err := range blame(answers) {
		readings[i].err = err
	}
	return combineLinks(readings, answers)
}

// locate looks for GPUs that did not say where they are.
func locate(devices []gpu.Device, h host.Host) {
	mute := func(d gpu.Device) bool { return d.PCIBusID == "" }
	if !slices.ContainsFunc(devices, mute) {
		return
	}
	fillAddresses(devices, gpuAddresses(h))
	for i := range devices {
		if d := &devices[i]; d.NUMANode == gpu.NoNUMANode && d.PCIBusID != "" {
			d.NUMANode = numaNode(h, d.PCIBusID)
		}
	}
}
