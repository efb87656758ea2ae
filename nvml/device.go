package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"

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
	nvlinks []nvlink
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

	mu  sync.Mutex // so that what was read can be taken from a reader that hangs
	got reading
}

func (r *reader) note(f func(got *reading)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.got)
}

// soFar is what has been read.
func (r *reader) soFar() reading {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.got
}

// readGPU reads a GPU in a task of its own and gives up at the end of ctx. With its links that is another task than
// without: who does not ask for them waits for no call about them, and a port that hangs costs its GPU nothing.
func (d *driver) readGPU(ctx context.Context, index int, links bool) reading {
	r := &reader{d: d, index: index, got: reading{minor: gpu.NoMinor}}
	name := fmt.Sprintf("GPU %d", index)
	if links {
		name += " with its links"
	}
	work := func(t *task) {
		r.t = t
		r.read(links)
	}
	err := d.tasks.do(ctx, name, work, nil)
	got := r.soFar()
	if err != nil {
		got.err = err
	}
	return got
}

// read asks everything about the GPU, what is essential first.
func (r *reader) read(links bool) {
	steps := []func(nvml.Device) error{r.identity, r.properties, r.mig}
	if links {
		steps = append(steps, r.nvlinks)
	}
	handle, err := ask(r.d, r.t, "nvmlDeviceGetHandleByIndex", func() (nvml.Device, nvml.Return) {
		return r.d.api.DeviceGetHandleByIndex(r.index)
	})
	for i := 0; err == nil && i < len(steps); i++ {
		err = steps[i](handle)
	}
	r.note(func(got *reading) { got.handle, got.err = handle, err })
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
