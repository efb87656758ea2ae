package nvml

import (
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// readMIG reads the MIG mode and, if it is on, the MIG devices.
func (r *gpuReader) readMIG(dev nvml.Device) error {
	mode, err := optional(invoke(r.library, r.c, "nvmlDeviceGetMigMode", func() (int, nvml.Return) {
		current, _, code := dev.GetMigMode()
		r.got.MIGCapable = code == nvml.SUCCESS
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
		m, err := r.migDevice(handle)
		if err != nil {
			return fmt.Errorf("MIG device %d: %w", i, err)
		}
		m.Index = i
		r.got.MIG = append(r.got.MIG, m)
	}
	return nil
}

// migDevice reads a MIG device of the GPU, except its index and its capabilities.
func (r *gpuReader) migDevice(mig nvml.Device) (m gpu.MIGDevice, err error) {
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
	m.Attributes = gpu.MIGAttributes{
		Multiprocessors: int(attributes.MultiprocessorCount),
		GPUSlices:       int(attributes.GpuInstanceSliceCount), ComputeSlices: int(attributes.ComputeInstanceSliceCount),
		CopyEngines: int(attributes.SharedCopyEngineCount), Decoders: int(attributes.SharedDecoderCount),
		Encoders: int(attributes.SharedEncoderCount), JPEGEngines: int(attributes.SharedJpegCount),
		OFAEngines: int(attributes.SharedOfaCount),
	}
	m.Profile, err = r.migProfile(mig, attributes)
	return m, err
}

// migProfile returns the name of the device's profile. It is the end of the MIG device's name. An old driver gives no
// such names; then the profile's name is made from the device's size.
func (r *gpuReader) migProfile(mig nvml.Device, a nvml.DeviceAttributes) (string, error) {
	name, err := optional(invoke(r.library, r.c, "nvmlDeviceGetName", mig.GetName))
	if err != nil {
		return "", err
	}
	if profile := name[strings.LastIndexByte(name, ' ')+1:]; profilePattern().MatchString(profile) {
		return profile, nil
	}
	return profileName(int(a.ComputeInstanceSliceCount), int(a.GpuInstanceSliceCount),
		migGigabytes(r.got.MemoryBytes, a.MemorySizeMB)), nil
}

// profilePattern matches NVIDIA's names of MIG profiles: compute slices if there are fewer than in the GPU instance,
// GPU slices, memory, attributes.
var profilePattern = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([0-9]+c\.)?[0-9]+g\.[0-9]+gb([+-][a-z0-9.,]+)?$`)
})

// profileName makes the name of a profile from its slices and gigabytes.
func profileName(computeSlices, gpuSlices, gigabytes int) string {
	name := fmt.Sprintf("%dg.%dgb", gpuSlices, gigabytes)
	if computeSlices != gpuSlices {
		return fmt.Sprintf("%dc.%s", computeSlices, name)
	}
	return name
}

// migGigabytes returns the memory in the name of a profile. It is the GPU's memory, in whole GiB, times the share of
// the MIG device. The share is rounded up to eighths, in which the GPU's memory is divided. So 9,728 MiB of an 80 GiB
// GPU are 10.
func migGigabytes(gpuBytes, migMiB uint64) int {
	if gpuBytes == 0 {
		return int((migMiB + 1023) >> 10)
	}
	gib := (gpuBytes + 1<<30 - 1) >> 30
	eighths := (migMiB<<20*8 + gpuBytes - 1) / gpuBytes
	return int((eighths*gib + 4) / 8)
}
