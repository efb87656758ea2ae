package nvml

import (
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// BenchmarkRead reads eight GPUs, as fast as the simulated library is and with a driver that takes 50 µs for a call.
// The floor is nvmlInit, nvmlDeviceGetCount and nvmlShutdown in the same run.
func BenchmarkRead(b *testing.B) {
	node := nodeOf(b, "dgx-h100")
	l, h := opened(b, node)
	for _, latency := range []time.Duration{0, 50 * time.Microsecond} {
		must(b, node.Latency(latency))
		name := "latency=" + latency.String()
		b.Run(name+"/snapshot", func(b *testing.B) {
			againstFloor(b, l, func() error { _, err := l.Snapshot(b.Context(), h); return err })
		})
		b.Run(name+"/devices", func(b *testing.B) {
			againstFloor(b, l, func() error { _, err := l.Devices(b.Context(), h); return err })
		})
	}
	must(b, node.Clear())
}

func againstFloor(b *testing.B, l *Library, read func() error) {
	const rounds = 50
	begin := time.Now()
	for range rounds {
		if l.driver.api.Init() != nvml.SUCCESS {
			b.Fatal("nvmlInit")
		}
		if _, code := l.driver.api.DeviceGetCount(); code != nvml.SUCCESS {
			b.Fatal("nvmlDeviceGetCount")
		}
		if l.driver.api.Shutdown() != nvml.SUCCESS {
			b.Fatal("nvmlShutdown")
		}
	}
	floor := time.Since(begin) / rounds
	for b.Loop() {
		if err := read(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(floor.Nanoseconds()), "floor-ns")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(floor.Nanoseconds()), "x-floor")
}
