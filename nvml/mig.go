package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// migReading is what the driver said about one MIG device.
type migReading struct {
	index   int
	uuid    string
	gi, ci  int
	profile string
	memory  uint64
}

func (m *migReading) device(parentMinor int, caps capMinors) gpu.MIGDevice {
	return gpu.MIGDevice{
		Index:              m.index,
		UUID:               m.uuid,
		Profile:            m.profile,
		GPUInstance:        m.gi,
		ComputeInstance:    m.ci,
		GPUInstanceCap:     caps.gpuInstance(parentMinor, m.gi),
		ComputeInstanceCap: caps.computeInstance(parentMinor, m.gi, m.ci),
		MemoryBytes:        m.memory,
	}
}

// mig reads the MIG mode and, if it is on, the MIG devices.
func (r *reader) mig(dev nvml.Device) error {
	mode, err := optional(ask(r.d, r.t, "nvmlDeviceGetMigMode", func() (int, nvml.Return) {
		current, _, code := dev.GetMigMode()
		return current, code
	}))
	if err != nil {
		return err
	}
	r.note(func(got *reading) { got.migMode = mode })
	if mode != nvml.DEVICE_MIG_ENABLE {
		return nil
	}
	count, err := ask(r.d, r.t, "nvmlDeviceGetMaxMigDeviceCount", dev.GetMaxMigDeviceCount)
	if err != nil {
		return err
	}
	for i := range count {
		if err := r.migAt(dev, i); err != nil {
			return fmt.Errorf("MIG device %d: %w", i, err)
		}
	}
	return nil
}

// migAt reads the MIG device with that index. There need not be one: the indices in use can have gaps.
func (r *reader) migAt(dev nvml.Device, index int) error {
	handle, err := ask(r.d, r.t, "nvmlDeviceGetMigDeviceHandleByIndex", func() (nvml.Device, nvml.Return) {
		return dev.GetMigDeviceHandleByIndex(index)
	})
	if hasCode(err, nvml.ERROR_NOT_FOUND, nvml.ERROR_INVALID_ARGUMENT) {
		return nil
	}
	if err != nil {
		return err
	}
	m, err := r.migDevice(dev, handle)
	if err != nil {
		return err
	}
	m.index = index
	r.note(func(got *reading) { got.mig = append(got.mig, m) })
	return nil
}

// migDevice reads a MIG device of the GPU.
func (r *reader) migDevice(parent, mig nvml.Device) (m migReading, err error) {
	if m.uuid, err = ask(r.d, r.t, "nvmlDeviceGetUUID", mig.GetUUID); err != nil {
		return m, err
	}
	if m.gi, err = ask(r.d, r.t, "nvmlDeviceGetGpuInstanceId", mig.GetGpuInstanceId); err != nil {
		return m, err
	}
	if m.ci, err = ask(r.d, r.t, "nvmlDeviceGetComputeInstanceId", mig.GetComputeInstanceId); err != nil {
		return m, err
	}
	attributes, err := ask(r.d, r.t, "nvmlDeviceGetAttributes", mig.GetAttributes)
	if err != nil {
		return m, err
	}
	m.memory = attributes.MemorySizeMB << 20
	m.profile, err = r.migProfile(parent, mig, m.gi, attributes)
	return m, err
}

// migProfile is the name of the device's profile: the end of the MIG device's name and, where a driver gives no such
// name, put together from its size and the kind of its GPU instance.
func (r *reader) migProfile(parent, mig nvml.Device, gi int, a nvml.DeviceAttributes) (string, error) {
	name, err := optional(ask(r.d, r.t, "nvmlDeviceGetName", mig.GetName))
	if err != nil {
		return "", err
	}
	if profile, ok := profileOfName(name); ok {
		return profile, nil
	}
	kind, err := r.instanceKind(parent, gi)
	if err != nil {
		return "", err
	}
	return profileName(int(a.ComputeInstanceSliceCount), int(a.GpuInstanceSliceCount),
		migGigabytes(r.got.memory, a.MemorySizeMB), kind), nil
}

// instanceKind is the number of the GPU instance's profile among NVML's NVML_GPU_INSTANCE_PROFILE_*.
func (r *reader) instanceKind(parent nvml.Device, gi int) (int, error) {
	instance, err := ask(r.d, r.t, "nvmlDeviceGetGpuInstanceById", func() (nvml.GpuInstance, nvml.Return) {
		return parent.GetGpuInstanceById(gi)
	})
	if err != nil {
		return 0, err
	}
	info, err := ask(r.d, r.t, "nvmlGpuInstanceGetInfo", instance.GetInfo)
	if err != nil {
		return 0, err
	}
	for kind := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		profile, err := ask(r.d, r.t, "nvmlDeviceGetGpuInstanceProfileInfo",
			func() (nvml.GpuInstanceProfileInfo, nvml.Return) { return parent.GetGpuInstanceProfileInfo(kind) })
		switch {
		case hasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT):
		case err != nil:
			return 0, err
		case profile.Id == info.ProfileId:
			return kind, nil
		}
	}
	return 0, fmt.Errorf("GPU instance %d has profile %d, which the GPU does not list", gi, info.ProfileId)
}
