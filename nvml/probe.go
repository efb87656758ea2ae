package nvml

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// Probes reads the health of GPUs of the last snapshot, in its order: of those with these UUIDs, or of all. It waits one
// second for GPUs that do not answer. An error is about the driver as a whole.
func (s *Session) Probes(ctx context.Context, uuids ...string) ([]gpu.Probe, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil || s.released {
		return nil, nil
	}
	if err := s.open(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.wait())
	defer cancel()
	devices := slices.Clone(s.last.Devices)
	if len(uuids) > 0 {
		devices = slices.DeleteFunc(devices, func(d gpu.Device) bool { return !slices.Contains(uuids, d.UUID) })
	}
	probes := make([]gpu.Probe, len(devices))
	var all sync.WaitGroup
	for i := range probes {
		all.Go(func() { probes[i] = s.probe(ctx, &devices[i]) })
	}
	all.Wait()
	return probes, nil
}

// probe reads the health of a GPU.
func (s *Session) probe(ctx context.Context, d *gpu.Device) gpu.Probe {
	l := s.library
	p := gpu.Probe{UUID: d.UUID, RecoveryAction: gpu.NoRecoveryAction}
	if !d.Usable() {
		p.Error = d.Error
		return p
	}
	got, err := ask(ctx, &l.calls, "health of "+d.UUID, s.tolerated(), func(c *call) (gpu.Probe, error) {
		got := p
		err := (&prober{l, c, &got}).read()
		return got, err
	})
	if err != nil {
		p.Error = err.Error()
		return p
	}
	return got
}

// prober reads the health of one GPU.
type prober struct {
	*library
	c   *call
	got *gpu.Probe
}

func (p *prober) read() error {
	dev, err := invoke(p.library, p.c, "nvmlDeviceGetHandleByUUID", func() (nvml.Device, nvml.Return) {
		return p.api.DeviceGetHandleByUUID(p.got.UUID)
	})
	if err != nil {
		return err
	}
	if p.got.RecoveryAction, err = p.recoveryAction(p.c, dev); err != nil {
		return err
	}
	for _, read := range []func(nvml.Device) error{p.readMemory, p.readNVLinks, p.readFabric, p.readTemperature} {
		if err := read(dev); err != nil {
			return err
		}
	}
	return nil
}

// recoveryAction is the driver's verdict about a GPU.
func (l *library) recoveryAction(c *call, dev nvml.Device) (int, error) {
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	_, err := invoke(l, c, "nvmlDeviceGetFieldValues", noValue(func() nvml.Return { return dev.GetFieldValues(values) }))
	if _, err := optional(0, err); err != nil {
		return gpu.NoRecoveryAction, err
	}
	if err != nil || nvml.Return(values[0].NvmlReturn) != nvml.SUCCESS {
		return gpu.NoRecoveryAction, nil //nolint:nilerr // an older driver
	}
	return fieldInt(&values[0]), nil
}

// fieldInt is the value of a field whose type is any integer.
func fieldInt(v *nvml.FieldValue) int {
	u := binary.NativeEndian.Uint64(v.Value[:])
	switch nvml.ValueType(v.ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT:
		return int(uint32(u))
	case nvml.VALUE_TYPE_SIGNED_INT:
		return int(int32(u))
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return int(uint16(u))
	default:
		return int(u)
	}
}

// readMemory reads what is wrong with the memory.
func (p *prober) readMemory(dev nvml.Device) error {
	type rows struct{ pending, failed bool }
	remapped, err := optional(invoke(p.library, p.c, "nvmlDeviceGetRemappedRows", func() (rows, nvml.Return) {
		_, _, pending, failed, code := dev.GetRemappedRows()
		return rows{pending, failed}, code
	}))
	if err != nil {
		return err
	}
	const function = "nvmlDeviceGetRetiredPagesPendingStatus"
	retired, err := optional(invoke(p.library, p.c, function, dev.GetRetiredPagesPendingStatus))
	if err != nil {
		return err
	}
	ecc, err := optional(invoke(p.library, p.c, "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
		return dev.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	}))
	if err != nil {
		return err
	}
	p.got.RemapPending, p.got.RemapFailed = remapped.pending, remapped.failed
	p.got.RetirementPending, p.got.UncorrectedECC = retired == nvml.FEATURE_ENABLED, ecc
	return nil
}

func (p *prober) readNVLinks(dev nvml.Device) error {
	for port := range nvml.NVLINK_MAX_LINKS {
		state, err := invoke(p.library, p.c, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return dev.GetNvLinkState(port)
		})
		switch {
		case hasCode(err, nvml.ERROR_INVALID_ARGUMENT): // the port after the last
			return nil
		case hasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND):
			if port == 0 {
				return nil // no NVLink at all
			}
		case err != nil:
			return fmt.Errorf("NVLink %d: %w", port, err)
		case state == nvml.FEATURE_ENABLED:
			p.got.NVLinks |= 1 << port
		}
	}
	return nil
}

func (p *prober) readFabric(dev nvml.Device) error {
	info, err := optional(invoke(p.library, p.c, "nvmlDeviceGetGpuFabricInfo", dev.GetGpuFabricInfo))
	if err != nil {
		return err
	}
	switch {
	case info.State == nvml.GPU_FABRIC_STATE_IN_PROGRESS, info.State == nvml.GPU_FABRIC_STATE_NOT_STARTED:
		p.got.Fabric = gpu.FabricStarting
	case info.State == nvml.GPU_FABRIC_STATE_COMPLETED && info.Status == uint32(nvml.SUCCESS):
		p.got.Fabric = gpu.FabricCompleted
	case info.State == nvml.GPU_FABRIC_STATE_COMPLETED:
		p.got.Fabric = gpu.FabricFailed
	}
	return nil
}

func (p *prober) readTemperature(dev nvml.Device) error {
	now, err := optional(invoke(p.library, p.c, "nvmlDeviceGetTemperature", func() (uint32, nvml.Return) {
		return dev.GetTemperature(nvml.TEMPERATURE_GPU)
	}))
	if err != nil {
		return err
	}
	shutdown, err := optional(invoke(p.library, p.c, "nvmlDeviceGetTemperatureThreshold", func() (uint32, nvml.Return) {
		return dev.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SHUTDOWN)
	}))
	if err != nil {
		return err
	}
	p.got.Temperature, p.got.ShutdownTemperature = int(now), int(shutdown)
	return nil
}
