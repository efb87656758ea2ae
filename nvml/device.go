package nvml

import (
	"context"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// reading is what the driver said about one GPU, as far as it got.
type reading struct {
	handle  nvml.Device
	uuid    string
	minor   int
	bus     string // as sysfs writes it
	name    string
	memory  uint64
	cc      capability
	migMode int
	mig     []migReading
	caps    capMinors
	err     error
}

// capability is a compute capability.
type capability struct{ major, minor int }

func (c capability) String() string {
	if c == (capability{}) {
		return ""
	}
	return fmt.Sprintf("%d.%d", c.major, c.minor)
}

// reader reads one GPU.
type reader struct {
	d     *driver
	t     *task
	index int
	got   reading
}

// note changes what has been read, and makes it known while the reader hangs.
func (r *reader) note(f func(got *reading)) {
	f(&r.got)
	r.t.learned(r.got)
}

func gpuTask(index int) string { return fmt.Sprintf("GPU %d", index) }

// readGPU reads a GPU, and waits for it until ctx ends.
func (l *Library) readGPU(ctx context.Context, index int) reading {
	got, err := read(ctx, l, gpuTask(index), func(t *task) (reading, error) {
		r := &reader{d: l.driver, t: t, index: index}
		err := r.read()
		return r.got, err
	})
	got.err = err
	if got.bus == "" { // which is read first
		got.minor = gpu.NoMinor
	}
	return got
}

// read asks everything about the GPU, what is essential first.
func (r *reader) read() error {
	handle, err := ask(r.d, r.t, "nvmlDeviceGetHandleByIndex", func() (nvml.Device, nvml.Return) {
		return r.d.api.DeviceGetHandleByIndex(r.index)
	})
	if err != nil {
		return err
	}
	r.note(func(got *reading) { got.handle, got.minor = handle, gpu.NoMinor })
	for _, step := range []func(nvml.Device) error{r.identity, r.properties, r.mig} {
		if err := step(handle); err != nil {
			return err
		}
	}
	return nil
}

// identity reads what a device cannot be used without.
func (r *reader) identity(dev nvml.Device) error {
	uuid, err := ask(r.d, r.t, "nvmlDeviceGetUUID", dev.GetUUID)
	if err != nil {
		return err
	}
	r.note(func(got *reading) { got.uuid = uuid })
	pci, err := ask(r.d, r.t, "nvmlDeviceGetPciInfo", dev.GetPciInfo)
	if err != nil {
		return err
	}
	bus, err := busID(pci)
	if err != nil {
		return fmt.Errorf("nvmlDeviceGetPciInfo: %w", err)
	}
	r.note(func(got *reading) { got.bus = bus })
	minor, err := ask(r.d, r.t, "nvmlDeviceGetMinorNumber", dev.GetMinorNumber)
	if err != nil {
		return err
	}
	r.note(func(got *reading) { got.minor = minor })
	return nil
}

// properties reads what a GPU or an old driver need not have.
func (r *reader) properties(dev nvml.Device) error {
	name, err := optional(ask(r.d, r.t, "nvmlDeviceGetName", dev.GetName))
	if err != nil {
		return err
	}
	r.note(func(got *reading) { got.name = name })
	memory, err := optional(ask(r.d, r.t, "nvmlDeviceGetMemoryInfo", dev.GetMemoryInfo))
	if err != nil {
		return err
	}
	r.note(func(got *reading) { got.memory = memory.Total })
	cc, err := optional(ask(r.d, r.t, "nvmlDeviceGetCudaComputeCapability", func() (capability, nvml.Return) {
		major, minor, code := dev.GetCudaComputeCapability()
		return capability{major, minor}, code
	}))
	if err != nil {
		return err
	}
	r.note(func(got *reading) { got.cc = cc })
	return nil
}

// busID is the PCI address of NVML's structure as sysfs writes it.
func busID(pci nvml.PciInfo) (string, error) { return gpu.NormalizePCIBusID(cString(pci.BusId[:])) }

// cString is the text up to the first NUL.
func cString(chars []int8) string {
	var text []byte
	for _, c := range chars {
		if c == 0 {
			break
		}
		text = append(text, byte(c))
	}
	return string(text)
}

// readCaps reads the minors of MIG devices, if there are any, into the readings.
func readCaps(readings []reading, h host.Host) {
	if !slices.ContainsFunc(readings, func(got reading) bool { return len(got.mig) > 0 }) {
		return
	}
	caps, err := readCapMinors(h)
	for i := range readings {
		readings[i].caps = caps
		if len(readings[i].mig) > 0 && readings[i].err == nil {
			readings[i].err = err
		}
	}
}

// device is the reading as the project speaks of GPUs.
func (got *reading) device(index int, h host.Host) gpu.Device {
	d := gpu.Device{
		Index:             index,
		UUID:              got.uuid,
		Name:              got.name,
		Minor:             got.minor,
		PCIBusID:          got.bus,
		NUMANode:          gpu.NoNUMANode,
		MemoryBytes:       got.memory,
		ComputeCapability: got.cc.String(),
		MIGEnabled:        got.migMode == nvml.DEVICE_MIG_ENABLE,
		MIG:               []gpu.MIGDevice{},
	}
	if got.bus != "" {
		d.NUMANode = numaNode(h, got.bus)
	}
	for _, m := range got.mig {
		d.MIG = append(d.MIG, m.device(got.minor, got.caps))
	}
	if got.err != nil {
		d.Error = got.err.Error()
	}
	return d
}
