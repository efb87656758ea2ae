package nvml

import (
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/internal/lazy"
)

// profilePattern is what NVIDIA's names of MIG profiles look like: compute slices where they are fewer than the GPU
// instance's, GPU slices, memory, attributes.
var profilePattern = lazy.Regexp(`^([0-9]+c\.)?[0-9]+g\.[0-9]+gb([+-][a-z0-9.,]+)?$`)

// profileOfName takes the profile from the name of a MIG device, such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
func profileOfName(name string) (string, bool) {
	profile := name[strings.LastIndexByte(name, ' ')+1:]
	return profile, profilePattern().MatchString(profile)
}

// profileName puts a profile's name together from slices, gigabytes and the kind of GPU instance
// (NVML_GPU_INSTANCE_PROFILE_*).
func profileName(computeSlices, gpuSlices, gigabytes, kind int) string {
	name := fmt.Sprintf("%dg.%dgb%s", gpuSlices, gigabytes, attributesOfKind(kind))
	if computeSlices != gpuSlices {
		return fmt.Sprintf("%dc.%s", computeSlices, name)
	}
	return name
}

// attributesOfKind is what the profile's name has at its end: media extensions (me), without, all of them, graphics.
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
