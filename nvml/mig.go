package nvml

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// readMIG reads the MIG mode and, if it is on, the MIG devices.
func (r *gpuReader) readMIG(dev nvml.Device) error {
	mode, err := optional(invoke(r.library, r.c, "nvmlDeviceGetMigMode", func() (int, nvml.Return) {
		current, _, code := dev.GetMigMode()
		return current, code
	}))
	if err != nil || mode != nvml.DEVICE_MIG_ENABLE {
		return err
	}
	r.got.MIGEnabled = true
	count, err := invoke(r.library, r.c, "nvmlDeviceGetMaxMigDeviceCount", dev.GetMaxMigDeviceCount)
	if err != nil {
		return err
	}
	for i := range count {
		handle, err := invoke(r.library, r.c, "nvmlDeviceGetMigDeviceHandleByIndex", func() (nvml.Device, nvml.Return) {
			return dev.GetMigDeviceHandleByIndex(i)
		})
		if hasCode(err, nvml.ERROR_NOT_FOUND, nvml.ERROR_INVALID_ARGUMENT) {
			continue // the indices in use can have gaps
		}
		if err != nil {
			return fmt.Errorf("MIG device %d: %w", i, err)
		}
		m, err := r.migDevice(dev, handle)
		if err != nil {
			return fmt.Errorf("MIG device %d: %w", i, err)
		}
		m.Index = i
		r.got.MIG = append(r.got.MIG, m)
	}
	return nil
}

// migDevice reads a MIG device of the GPU, except its index and its capabilities.
func (r *gpuReader) migDevice(parent, mig nvml.Device) (m gpu.MIGDevice, err error) {
	if m.UUID, err = invoke(r.library, r.c, "nvmlDeviceGetUUID", mig.GetUUID); err != nil {
		return m, err
	}
	if m.GPUInstance, err = invoke(r.library, r.c, "nvmlDeviceGetGpuInstanceId", mig.GetGpuInstanceId); err != nil {
		return m, err
	}
	m.ComputeInstance, err = invoke(r.library, r.c, "nvmlDeviceGetComputeInstanceId", mig.GetComputeInstanceId)
	if err != nil {
		return m, err
	}
	attributes, err := invoke(r.library, r.c, "nvmlDeviceGetAttributes", mig.GetAttributes)
	if err != nil {
		return m, err
	}
	m.MemoryBytes = attributes.MemorySizeMB << 20
	m.Profile, err = r.migProfile(parent, mig, m.GPUInstance, attributes)
	return m, err
}

// migProfile is the name of the device's profile: the end of the MIG device's name or, where a driver has no such name,
// made from its size and the kind of its GPU instance.
func (r *gpuReader) migProfile(parent, mig nvml.Device, gi int, a nvml.DeviceAttributes) (string, error) {
	name, err := optional(invoke(r.library, r.c, "nvmlDeviceGetName", mig.GetName))
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
		migGigabytes(r.got.MemoryBytes, a.MemorySizeMB), kind), nil
}

// instanceKind is the number of the GPU instance's profile among NVML's NVML_GPU_INSTANCE_PROFILE_*.
func (r *gpuReader) instanceKind(parent nvml.Device, gi int) (int, error) {
	instance, err := invoke(r.library, r.c, "nvmlDeviceGetGpuInstanceById", func() (nvml.GpuInstance, nvml.Return) {
		return parent.GetGpuInstanceById(gi)
	})
	if err != nil {
		return 0, err
	}
	info, err := invoke(r.library, r.c, "nvmlGpuInstanceGetInfo", instance.GetInfo)
	if err != nil {
		return 0, err
	}
	for kind := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		profile, err := invoke(r.library, r.c, "nvmlDeviceGetGpuInstanceProfileInfo",
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

// profilePattern matches NVIDIA's names of MIG profiles: compute slices where they are fewer than the GPU instance's,
// GPU slices, memory, attributes.
var profilePattern = regexp.MustCompile(`^([0-9]+c\.)?[0-9]+g\.[0-9]+gb([+-][a-z0-9.,]+)?$`)

// profileOfName cuts the profile from the name of a MIG device, such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
func profileOfName(name string) (string, bool) {
	profile := name[strings.LastIndexByte(name, ' ')+1:]
	return profile, profilePattern.MatchString(profile)
}

// profileName makes a profile's name from slices, gigabytes and the kind of GPU instance (NVML_GPU_INSTANCE_PROFILE_*).
func profileName(computeSlices, gpuSlices, gigabytes, kind int) string {
	name := fmt.Sprintf("%dg.%dgb%s", gpuSlices, gigabytes, attributesOfKind(kind))
	if computeSlices != gpuSlices {
		return fmt.Sprintf("%dc.%s", computeSlices, name)
	}
	return name
}

// attributesOfKind is the end of the profile's name: media extensions (me), none of them, all of them, or graphics.
func attributesOfKind(kind int) string {
	switch kind {
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:
		return "+me"
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME:
		return "+me.all"
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:
		return "-me"
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX,
		nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:
		return "+gfx"
	}
	return ""
}

// migGigabytes is the memory in a profile's name: the GPU's memory, in whole GiB, times the device's share of it,
// rounded up to an eighth, as the GPU's memory is cut. So 9,728 MiB of an 80 GiB GPU are 10.
func migGigabytes(gpuBytes, migMiB uint64) int {
	if gpuBytes == 0 {
		return int((migMiB + 1023) >> 10)
	}
	gib := (gpuBytes + 1<<30 - 1) >> 30
	eighths := (migMiB<<20*8 + gpuBytes - 1) / gpuBytes
	return int((eighths*gib + 4) / 8)
}
