package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestMIGProfile(t *testing.T) {
	for name, want := range map[string]string{
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb":     "1g.10gb",
		"NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb":  "1c.3g.20gb",
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb+me":  "1g.10gb+me",
		"NVIDIA RTX PRO 6000 MIG 2g.48gb-me":    "2g.48gb-me",
		"NVIDIA RTX PRO 6000 MIG 1g.24gb+gfx":   "1g.24gb+gfx",
		"NVIDIA B200 MIG 1g.23gb+me.all":        "1g.23gb+me.all",
		"1g.10gb":                               "1g.10gb",
		"NVIDIA H100 80GB HBM3":                 "1g.1gb",
		"NVIDIA H100 80GB HBM3 MIG":             "1g.1gb",
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb+":    "1g.1gb",
		"NVIDIA H100 80GB HBM3 MIG 1g.10gb/../": "1g.1gb",
		"":                                      "1g.1gb",
	} {
		t.Run(name, func(t *testing.T) {
			r := gpuReader{library: &library{has: func(string) bool { return true }}, c: &call{calls: &calls{}}}
			a := nvml.DeviceAttributes{ComputeInstanceSliceCount: 1, GpuInstanceSliceCount: 1, MemorySizeMB: 1 << 10}
			got, err := r.migProfile(createMIG("", 0, 0, name, 0), a)
			if got != want || err != nil {
				t.Errorf("got %q and error %v, want %q", got, err, want)
			}
		})
	}
}

func TestProfileName(t *testing.T) {
	const a100, h100 = 40 << 30, 80 << 30
	for want, c := range map[string]struct {
		compute, gpu int
		memory, mib  uint64
	}{
		"1g.5gb":     {1, 1, a100, 4864},
		"3g.20gb":    {3, 3, a100, 19968},
		"7g.40gb":    {7, 7, a100, 40192},
		"1g.10gb":    {1, 1, h100, 9728},
		"1g.20gb":    {1, 1, h100, 19968},
		"1c.3g.40gb": {1, 3, h100, 40448},
		"1g.23gb":    {1, 1, 183359 << 20, 22144}, // 22.5, of a B200
		"1g.11gb":    {1, 1, 0, 10300},            // the GPU's memory is unknown
	} {
		t.Run(want, func(t *testing.T) {
			if got := profileName(c.compute, c.gpu, migGigabytes(c.memory, c.mib)); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}
