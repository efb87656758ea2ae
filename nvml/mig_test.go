package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestProfileOfName(t *testing.T) {
	for name, want := range map[string]string{
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb":     "1g.10gb",
		"NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb":  "1c.3g.20gb",
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb+me":  "1g.10gb+me",
		"NVIDIA RTX PRO 6000 MIG 2g.48gb-me":    "2g.48gb-me",
		"NVIDIA RTX PRO 6000 MIG 1g.24gb+gfx":   "1g.24gb+gfx",
		"NVIDIA B200 MIG 1g.23gb+me.all":        "1g.23gb+me.all",
		"1g.10gb":                               "1g.10gb",
		"NVIDIA H100 80GB HBM3":                 "",
		"NVIDIA H100 80GB HBM3 MIG":             "",
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb+":    "",
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb/../": "",
		"":                                      "",
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := profileOfName(name)
			if ok != (want != "") || ok && got != want {
				t.Errorf("profileOfName(%q) = %q, %v, want %q", name, got, ok, want)
			}
		})
	}
}

func TestProfileName(t *testing.T) {
	const a100, h100 = 40 << 30, 80 << 30
	for want, c := range map[string]struct {
		compute, gpu int
		memory, mib  uint64
		kind         int
	}{
		"1g.5gb":         {1, 1, a100, 4864, nvml.GPU_INSTANCE_PROFILE_1_SLICE},
		"1g.5gb+me":      {1, 1, a100, 4864, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1},
		"3g.20gb":        {3, 3, a100, 19968, nvml.GPU_INSTANCE_PROFILE_3_SLICE},
		"7g.40gb":        {7, 7, a100, 40192, nvml.GPU_INSTANCE_PROFILE_7_SLICE},
		"1g.10gb":        {1, 1, h100, 9728, nvml.GPU_INSTANCE_PROFILE_1_SLICE},
		"1g.20gb":        {1, 1, h100, 19968, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2},
		"1c.3g.40gb":     {1, 3, h100, 40448, nvml.GPU_INSTANCE_PROFILE_3_SLICE},
		"2g.20gb-me":     {2, 2, h100, 19968, nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME},
		"1g.10gb+me.all": {1, 1, h100, 9728, nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME},
		"4g.40gb+gfx":    {4, 4, h100, 40448, nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX},
		"1g.23gb":        {1, 1, 183359 << 20, 22144, nvml.GPU_INSTANCE_PROFILE_1_SLICE}, // 22.5, of a B200
		"1g.11gb":        {1, 1, 0, 10300, nvml.GPU_INSTANCE_PROFILE_1_SLICE},            // the GPU's memory is unknown
	} {
		t.Run(want, func(t *testing.T) {
			if got := profileName(c.compute, c.gpu, migGigabytes(c.memory, c.mib), c.kind); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}
