package soak

import (
	"fmt"
	"testing"
	"time"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// A wait for events can return at once, for ever, that the GPU is lost, although all else about the GPU works. That
// costs no noticeable time: less than 1 % of a processor beside what serve takes anyway, such as for probes.
func TestServeDoesNotSpinWhileWaitsForEventsFail(t *testing.T) {
	t.Parallel()
	const (
		gpuIsLost = 15 // NVML_ERROR_GPU_IS_LOST
		length    = 20 * time.Second
		limit     = length / 100 // a wait for each GPU every 10 ms takes a third of length
	)
	s := startServe(t, "dgx-h100", "")
	anyway := s.processorTimeOf(length)
	testenv.Must(s, s.node.Fail("nvmlEventSetWait", sim.AnyGPU, gpuIsLost))
	gpus := len(s.node.Machine().GPUs)
	s.await("the events of no GPU are received", func() string {
		if n := s.number(s.readMetrics(), "gpu_cdi_plugin_gpu_events_received{"); n != 0 || len(s.healthy()) != gpus {
			return fmt.Sprintf("those of %d GPUs are, and %d are healthy", n, len(s.healthy()))
		}
		return ""
	})
	used := s.processorTimeOf(length)
	t.Logf("serve has used the processor for %v in %v, and for %v before", used, length, anyway)
	if used > anyway+limit {
		t.Errorf("serve has used the processor for %v in %v, want at most %v more than %v", used, length, limit, anyway)
	}
	if n := len(s.healthy()); n != gpus {
		t.Errorf("%d of %d GPUs are healthy, although their probes pass", n, gpus)
	}
}
