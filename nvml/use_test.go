package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

// What a driver does not report is unknown, and not nothing.
func TestUseThatTheDriverDoesNotReport(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, node, _ := newTestSession(t, "pcie-quad")
	for _, c := range []struct {
		missing []string
		want    gpu.Use
	}{
		{nil, gpu.Use{MemoryUsed: 20 << 30}},
		{[]string{"nvmlDeviceGetMemoryInfo_v2"}, gpu.Use{MemoryUsed: 20 << 30}},
		{[]string{"nvmlDeviceGetMemoryInfo"}, gpu.Use{MemoryUnknown: true}}, // all versions of it
		{
			[]string{"nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"},
			gpu.Use{MemoryUsed: 20 << 30},
		},
		{
			[]string{"nvmlDeviceGetComputeRunningProcesses"},
			gpu.Use{MemoryUsed: 20 << 30, ProcessesUnknown: true},
		},
	} {
		for _, code := range []nvml.Return{nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND} {
			testenv.Must(t, node.ClearGPU(1))
			testenv.Must(t, node.Set(1, map[string]string{"memory-used": "20GiB", "memory-reserved": "0"}))
			for _, function := range c.missing {
				fail(t, node, function, 1, code)
			}
			got, err := session.Use(t.Context(), uuidOf(node, 1))
			if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
				t.Errorf("without %v: error %v, use (-want +got):\n%s", c.missing, err, diff)
			}
		}
	}
	testenv.Must(t, node.ClearGPU(1))
	fail(t, node, "nvmlDeviceGetMemoryInfo_v2", 1, nvml.ERROR_UNKNOWN)
	if got, err := session.Use(t.Context(), uuidOf(node, 1)); err == nil {
		t.Errorf("with an error of the driver: %+v", got)
	}
}
