package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// driverSubject is the subject of calls about the driver as a whole; see [calls].
const driverSubject = "driver"

// readDevices reads the driver and its GPUs, without their links. It also returns NVML's handles of the GPUs that
// could be read, by index. An error concerns the driver as a whole.
func (s *Session) readDevices(ctx context.Context) (*gpu.Snapshot, []nvml.Device, error) {
	system, err := s.readSystem(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("read the driver: %w", err)
	}
	readings := s.readGPUs(ctx, system.gpus)
	snapshot := &gpu.Snapshot{DriverVersion: system.driverVersion, CUDAVersion: system.cudaVersion}
	for _, r := range readings {
		r.MIG = append([]gpu.MIGDevice{}, r.MIG...) // a copy, since the reading may be retained as the last answer
		snapshot.Devices = append(snapshot.Devices, r.Device)
	}
	s.addFromKernel(ctx, snapshot.Devices)
	if ctx.Err() != nil {
		return nil, nil, fmt.Errorf("read the GPUs: %w", context.Cause(ctx))
	}
	handles := make([]nvml.Device, len(readings))
	for i := range handles {
		if snapshot.Devices[i].Usable() {
			handles[i] = readings[i].handle
		}
	}
	return snapshot, handles, nil
}

// readGPUs reads all GPUs concurrently, and returns when all are read.
func (s *Session) readGPUs(ctx context.Context, n int) []gpuReading {
	ctx, cancel := context.WithTimeout(ctx, s.wait())
	defer cancel()
	readings := make([]gpuReading, n)
	var all sync.WaitGroup
	for i := range readings {
		all.Go(func() { readings[i] = s.readGPU(ctx, i) })
	}
	all.Wait()
	return readings
}

// systemReading is what the driver returned about itself, and the number of GPUs.
type systemReading struct {
	driverVersion, cudaVersion string
	gpus                       int
}

// readSystem reads the driver's versions and the number of GPUs. It waits longer for the driver's first answer, since
// everything else depends on it.
func (s *Session) readSystem(ctx context.Context) (systemReading, error) {
	l, wait := s.library, s.wait()
	if !l.calls.hasAnswered(driverSubject) {
		wait = s.openTimeout()
	}
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	got, err := ask(waiting, &l.calls, driverSubject, s.tolerated(), func(c *call) (r systemReading, err error) {
		if r.driverVersion, err = invoke(l, c, "nvmlSystemGetDriverVersion", l.api.SystemGetDriverVersion); err != nil {
			return r, err
		}
		if r.gpus, err = invoke(l, c, "nvmlDeviceGetCount", l.api.DeviceGetCount); err != nil {
			return r, err
		}
		// Only forward compatibility needs the CUDA version, so a driver that does not report it can be used.
		cuda, err := invoke(l, c, "nvmlSystemGetCudaDriverVersion", l.api.SystemGetCudaDriverVersion)
		if err == nil {
			r.cudaVersion = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10) // NVML returns 1000*major + 10*minor
		}
		return r, nil
	})
	if err != nil && ctx.Err() != nil {
		return got, context.Cause(ctx)
	}
	return got, classify(err)
}

// nameUnreadable gives GPUs that cannot be read the UUIDs and other properties of the previous snapshot, if there is
// one: a GPU that has fallen off the bus does not return its UUID, and would otherwise seem to have been removed.
func nameUnreadable(now, before *gpu.Snapshot) {
	if before == nil {
		return
	}
	for i := range now.Devices {
		d := &now.Devices[i]
		if d.Usable() {
			continue
		}
		if last := findBefore(now, before, d); last != nil {
			index, err := d.Index, d.Error
			*d = *last
			d.Index, d.Error = index, err
		}
	}
}

// findBefore finds a GPU that cannot be read in the previous snapshot, by its UUID or its PCI address. If both are
// unknown, it takes the GPU that had the same index, unless a GPU of the new snapshot has the UUID of that one.
func findBefore(now, before *gpu.Snapshot, d *gpu.Device) *gpu.Device {
	at := slices.IndexFunc(before.Devices, func(o gpu.Device) bool {
		switch {
		case d.UUID != "":
			return o.UUID == d.UUID
		case d.PCIBusID != "":
			return o.PCIBusID == d.PCIBusID
		}
		return o.Index == d.Index && !slices.ContainsFunc(now.Devices, func(n gpu.Device) bool { return n.UUID == o.UUID })
	})
	if at < 0 {
		return nil
	}
	return &before.Devices[at]
}
