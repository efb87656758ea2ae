package nvml

import (
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// BenchmarkRead reads eight GPUs, as fast as the simulated library is and with a driver that takes 50 µs for a call.
// The floor is nvmlInit, nvmlDeviceGetCount and nvmlShutdown in the same run.
func BenchmarkRead(b *testing.B) {
	node := createNode(b, "dgx-h100")
	session, _ := openNode(b, node)
	for _, latency := range []time.Duration{0, 50 * time.Microsecond} {
		testenv.Must(b, node.SetLatency(latency))
		name := "latency=" + latency.String()
		b.Run(name+"/topology", func(b *testing.B) {
			compareToFloor(b, session, func() error { _, err := session.readTopology(b.Context()); return err })
		})
		b.Run(name+"/devices", func(b *testing.B) {
			compareToFloor(b, session, func() error { _, _, err := session.read(b.Context()); return err })
		})
	}
	testenv.Must(b, node.Clear())
}

func compareToFloor(b *testing.B, session *Session, read func() error) {
	const rounds = 50
	begin := time.Now()
	for range rounds {
		if session.library.api.Init() != nvml.SUCCESS {
			b.Fatal("nvmlInit")
		}
		if _, code := session.library.api.DeviceGetCount(); code != nvml.SUCCESS {
			b.Fatal("nvmlDeviceGetCount")
		}
		if session.library.api.Shutdown() != nvml.SUCCESS {
			b.Fatal("nvmlShutdown")
		}
	}
	floor := time.Since(begin) / rounds
	for b.Loop() {
		testenv.Must(b, read())
	}
	b.ReportMetric(float64(floor.Nanoseconds()), "floor-ns")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(floor.Nanoseconds()), "x-floor")
}
