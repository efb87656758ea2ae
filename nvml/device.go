package nvml

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// gpuReading is what the driver returned about one GPU before the call returned or was abandoned.
type gpuReading struct {
	gpu.Device
	handle nvml.Device
}

// readGPU reads a GPU until ctx ends. What only the kernel shows is added later, by addFromKernel.
func (s *Session) readGPU(ctx context.Context, index int) gpuReading {
	none := gpuReading{Device: gpu.Device{Index: index, Minor: gpu.NoMinor}}
	l, subject := s.library, fmt.Sprintf("GPU %d", index)
	got, err := ask(ctx, &l.calls, subject, s.tolerated(), func(c *call) (gpuReading, error) {
		r := gpuReader{library: l, c: c, got: none}
		c.progress = func() any { return r.got }
		err := r.read()
		return r.got, err
	})
	if got.handle == nil { // the call may not have begun
		got = none
	}
	if err != nil {
		got.Error = err.Error()
	}
	return got
}

// gpuReader reads one GPU into `got`, by many functions of NVML.
type gpuReader struct {
	library *library
	c       *call
	got     gpuReading
}

// read reads the GPU's identity first.
func (r *gpuReader) read() error {
	handle, err := invoke(r.library, r.c, "nvmlDeviceGetHandleByIndex", func() (nvml.Device, nvml.Return) {
		return r.library.api.DeviceGetHandleByIndex(r.got.Index)
	})
	if err != nil {
		return err
	}
	r.got.handle = handle
	if err := r.readIdentity(handle); err != nil {
		return err
	}
	if err := r.readProperties(handle); err != nil {
		return err
	}
	return r.readMIG(handle)
}

// readIdentity reads the properties that every GPU has.
func (r *gpuReader) readIdentity(dev nvml.Device) (err error) {
	if r.got.UUID, err = invoke(r.library, r.c, "nvmlDeviceGetUUID", dev.GetUUID); err != nil {
		return err
	}
	pci, err := invoke(r.library, r.c, "nvmlDeviceGetPciInfo", dev.GetPciInfo)
	if err != nil {
		return err
	}
	if r.got.PCIBusID, err = busID(pci); err != nil {
		return fmt.Errorf("nvmlDeviceGetPciInfo: %w", err)
	}
	minor, err := invoke(r.library, r.c, "nvmlDeviceGetMinorNumber", dev.GetMinorNumber)
	if err != nil {
		return err
	}
	r.got.Minor = minor
	return nil
}

// readProperties reads the properties that some GPUs or old drivers lack.
func (r *gpuReader) readProperties(dev nvml.Device) (err error) {
	if r.got.Name, err = optional(invoke(r.library, r.c, "nvmlDeviceGetName", dev.GetName)); err != nil {
		return err
	}
	memory, err := optional(invoke(r.library, r.c, "nvmlDeviceGetMemoryInfo", dev.GetMemoryInfo))
	if err != nil {
		return err
	}
	r.got.MemoryBytes = memory.Total
	const function = "nvmlDeviceGetCudaComputeCapability"
	r.got.ComputeCapability, err = optional(invoke(r.library, r.c, function, func() (string, nvml.Return) {
		major, minor, code := dev.GetCudaComputeCapability()
		return fmt.Sprintf("%d.%d", major, minor), code
	}))
	if err != nil {
		return err
	}
	fabric, err := optional(invoke(r.library, r.c, "nvmlDeviceGetGpuFabricInfo", dev.GetGpuFabricInfo))
	r.got.FabricClique = clique(fabric)
	return err
}

// clique returns the clique of a GPU that has joined a fabric of several hosts, and otherwise "". The fabric of a
// single host has the UUID 0.
func clique(info nvml.GpuFabricInfo) string {
	joined := info.State == nvml.GPU_FABRIC_STATE_COMPLETED && nvml.Return(info.Status) == nvml.SUCCESS
	u := info.ClusterUuid
	if !joined || u == ([16]uint8{}) {
		return ""
	}
	return fmt.Sprintf("%x-%x-%x-%x-%x.%d", u[:4], u[4:6], u[6:8], u[8:10], u[10:], info.CliqueId)
}

// busID returns the PCI address of an NVML structure, written as in sysfs.
func busID(pci nvml.PciInfo) (string, error) {
	var text []byte
	for _, c := range pci.BusId {
		if c == 0 {
			break
		}
		text = append(text, byte(c))
	}
	return gpu.NormalizePCIBusID(string(text))
}
