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

// Probes reads the health of the GPUs with these UUIDs, or of all GPUs, in the order of the last snapshot. It waits
// one second for GPUs that do not answer. An error concerns the driver as a whole.
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
		last := s.probed[devices[i].UUID]
		all.Go(func() { probes[i] = s.probe(ctx, &devices[i], last) })
	}
	all.Wait()
	if s.probed == nil {
		s.probed = map[string]gpu.Probe{}
	}
	for _, p := range probes {
		if p.Error == "" {
			s.probed[p.UUID] = p
		}
	}
	return probes, nil
}

// probe reads the health of a GPU. The GPU may be lost, or missing in the last snapshot because it could not be read.
func (s *Session) probe(ctx context.Context, d *gpu.Device, last gpu.Probe) gpu.Probe {
	none := gpu.Probe{UUID: d.UUID, Error: d.Error, MIGEnabled: d.MIGEnabled, RecoveryAction: gpu.NoRecoveryAction}
	if d.UUID == "" {
		return none
	}
	got, err := s.readHealth(ctx, none, last)
	if err != nil {
		none.Error = err.Error()
		none.Lost = hasCode(err, nvml.ERROR_GPU_IS_LOST, nvml.ERROR_NOT_FOUND)
		none.NeedsReset = hasCode(err, nvml.ERROR_RESET_REQUIRED)
		return none
	}
	if !d.Usable() {
		return none
	}
	return got
}

// readHealth completes the probe `none` with what the driver reports about the GPU.
func (s *Session) readHealth(ctx context.Context, none, last gpu.Probe) (gpu.Probe, error) {
	l, subject := s.library, "health of "+none.UUID
	got, err := ask(ctx, &l.calls, subject, s.tolerated(), func(c *call) (gpu.Probe, error) {
		p := prober{library: l, c: c, last: last, got: none}
		err := p.read()
		return p.got, err
	})
	if err != nil {
		return got, err
	}
	got.Late = l.calls.runs(subject)
	got.NVLinks, err = s.probeNVLinks(ctx, none.UUID, last.NVLinks)
	return got, err
}

// probeNVLinks reads which NVLinks of a GPU are up. If this is unknown or the call hangs, it returns the previous
// state: a GPU can be used even if its links cannot be read.
func (s *Session) probeNVLinks(ctx context.Context, uuid string, before uint64) (uint64, error) {
	l := s.library
	links, err := ask(ctx, &l.calls, "NVLink states of "+uuid, s.tolerated(), func(c *call) (uint64, error) {
		dev, err := l.deviceByUUID(c, uuid)
		if err != nil {
			return 0, err
		}
		return l.nvlinkStates(c, dev, before)
	})
	if err != nil && !endsProbe(err) {
		return before, nil
	}
	return links, err
}

// prober reads the health of one GPU, except its NVLinks.
type prober struct {
	*library
	c    *call
	last gpu.Probe // the previous probe, or the zero value
	got  gpu.Probe
}

func (p *prober) read() error {
	dev, err := p.deviceByUUID(p.c, p.got.UUID)
	if err != nil {
		return err
	}
	if p.got.RecoveryAction, err = p.recoveryAction(p.c, dev); endsProbe(err) {
		return err
	}
	for _, read := range []func(nvml.Device) error{
		p.readMIGMode, p.readMemory, p.readFabric, p.readTemperature,
	} {
		if err := read(dev); err != nil {
			return err
		}
	}
	return nil
}

// endsProbe reports whether an error concerns the GPU as a whole. Other errors concern one reading.
func endsProbe(err error) bool {
	return hasCode(err, nvml.ERROR_GPU_IS_LOST, nvml.ERROR_RESET_REQUIRED)
}

// reading calls a function for one reading. If the function fails, the result is `unknown`. An error means that the
// probe must end.
func reading[T any](p *prober, unknown T, function string, f func() (T, nvml.Return)) (T, error) {
	v, err := invoke(p.library, p.c, function, f)
	switch {
	case endsProbe(err):
		return v, err
	case err != nil:
		return unknown, nil //nolint:nilerr // the function may fail for ever on a GPU that works
	}
	return v, nil
}

// recoveryAction returns the driver's recovery action for a GPU, or gpu.NoRecoveryAction.
func (l *library) recoveryAction(c *call, dev nvml.Device) (int, error) {
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	_, err := invoke(l, c, "nvmlDeviceGetFieldValues", noValue(func() nvml.Return { return dev.GetFieldValues(values) }))
	if err != nil || nvml.Return(values[0].NvmlReturn) != nvml.SUCCESS { // for example with an older driver
		return gpu.NoRecoveryAction, err
	}
	return fieldInt(&values[0]), nil
}

// fieldInt returns the value of a field of any integer type.
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

func (p *prober) readMIGMode(dev nvml.Device) error {
	unknown := nvml.DEVICE_MIG_DISABLE
	if p.got.MIGEnabled { // at the last snapshot
		unknown = nvml.DEVICE_MIG_ENABLE
	}
	mode, err := reading(p, unknown, "nvmlDeviceGetMigMode", func() (int, nvml.Return) {
		current, _, code := dev.GetMigMode()
		return current, code
	})
	p.got.MIGEnabled = mode == nvml.DEVICE_MIG_ENABLE
	return err
}

// readMemory reads the faults of the memory. If the error count is unknown, it keeps the previous count: with a lower
// count the next probe would report the same errors again.
func (p *prober) readMemory(dev nvml.Device) error {
	type rows struct{ pending, failed bool }
	remapped, err := reading(p, rows{}, "nvmlDeviceGetRemappedRows", func() (rows, nvml.Return) {
		_, _, pending, failed, code := dev.GetRemappedRows()
		return rows{pending, failed}, code
	})
	if err != nil {
		return err
	}
	retired, err := reading(p, nvml.FEATURE_DISABLED, "nvmlDeviceGetRetiredPagesPendingStatus",
		dev.GetRetiredPagesPendingStatus)
	if err != nil {
		return err
	}
	ecc, err := reading(p, p.last.UncorrectedECC, "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
		return dev.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	})
	if err != nil {
		return err
	}
	p.got.RemapPending, p.got.RemapFailed = remapped.pending, remapped.failed
	p.got.RetirementPending, p.got.UncorrectedECC = retired == nvml.FEATURE_ENABLED, ecc
	return nil
}

// nvlinkStates returns a bit for each NVLink that is up. If the state of a link is unknown, it keeps the previous bit.
func (l *library) nvlinkStates(c *call, dev nvml.Device, before uint64) (up uint64, err error) {
	for port := range nvml.NVLINK_MAX_LINKS {
		bit := uint64(1) << port
		state, err := invoke(l, c, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return dev.GetNvLinkState(port)
		})
		switch {
		case hasCode(err, nvml.ERROR_INVALID_ARGUMENT): // there are no more ports
			return up, nil
		case isNotSupported(err):
			if port == 0 {
				return 0, nil // the GPU has no NVLinks
			}
		case endsProbe(err):
			return up, fmt.Errorf("NVLink %d: %w", port, err)
		case err != nil:
			up |= before & bit
		case state == nvml.FEATURE_ENABLED:
			up |= bit
		}
	}
	return up, nil
}

func (p *prober) readFabric(dev nvml.Device) error {
	info, err := reading(p, nvml.GpuFabricInfo{}, "nvmlDeviceGetGpuFabricInfo", dev.GetGpuFabricInfo)
	if err != nil {
		return err
	}
	switch {
	case info.State == nvml.GPU_FABRIC_STATE_IN_PROGRESS, info.State == nvml.GPU_FABRIC_STATE_NOT_STARTED:
		p.got.Fabric = gpu.FabricStarting
	case info.State == nvml.GPU_FABRIC_STATE_COMPLETED && info.Status == uint32(nvml.SUCCESS):
		return p.readFabricHealth(dev)
	case info.State == nvml.GPU_FABRIC_STATE_COMPLETED:
		p.got.Fabric = gpu.FabricFailed
	}
	return nil
}

// readFabricHealth reads the health of the fabric that a GPU has joined. Older drivers do not report it. A fabric with
// less capacity works.
func (p *prober) readFabricHealth(dev nvml.Device) error {
	p.got.Fabric = gpu.FabricCompleted
	info, err := reading(p, nvml.GpuFabricInfo_v3{}, "nvmlDeviceGetGpuFabricInfoV", dev.GetGpuFabricInfoV().V3)
	if info.HealthSummary == nvml.GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY {
		p.got.Fabric = gpu.FabricUnhealthy
	}
	return err
}

func (p *prober) readTemperature(dev nvml.Device) error {
	now, err := reading(p, 0, "nvmlDeviceGetTemperature", func() (uint32, nvml.Return) {
		return dev.GetTemperature(nvml.TEMPERATURE_GPU)
	})
	if err != nil {
		return err
	}
	shutdown, err := reading(p, 0, "nvmlDeviceGetTemperatureThreshold", func() (uint32, nvml.Return) {
		return dev.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SHUTDOWN)
	})
	if err != nil {
		return err
	}
	p.got.Temperature, p.got.ShutdownTemperature = int(now), int(shutdown)
	return nil
}
