package bench

import (
	"strings"
	"testing"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
)

// BenchmarkGenerate is P6 of the targets: a spec for 8 GPUs and about 50 driver files, the whole process, beside
// nvidia-ctk's. Both run with the simulated node as their root and write to standard output. The floor is a Go program that
// opens the driver's library and ends.
func BenchmarkGenerate(b *testing.B) {
	node := simtest.Node(b, "dgx-h100")
	root, least := node.Root(), floor(b, node)
	suite.Install(b, root, least[0], shared.Peer(b, "nvidia-ctk"), shared.Program(b, "gpu-cdi-plugin"), shared.Program(b, "prestart-hook"))
	inside := func(args ...string) proc.Cmd {
		return proc.Cmd{Args: args, Chroot: root, Env: []string{"PATH=/usr/sbin:/usr/bin"}}
	}
	opens := &variant{name: "a Go program that opens NVML", cmd: inside("/usr/bin/floor", strings.TrimPrefix(least[1], root))}
	our := &variant{name: "gpu-cdi-plugin cdi generate", cmd: inside("/usr/bin/gpu-cdi-plugin", "--hook-path", "/usr/bin/prestart-hook", "cdi", "generate")}
	their := &variant{name: "nvidia-ctk cdi generate", cmd: inside("/usr/bin/nvidia-ctk", "cdi", "generate")}
	for b.Loop() {
		measure(b, rounds, []*variant{opens, our, their})
	}
	logTable(b, "cdi generate, dgx-h100", []*variant{opens, our, their})
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(our.median()), "ms")
	b.ReportMetric(ms(opens.median()), "floor-ms")
	b.ReportMetric(ms(their.median()), "peer-ms")
	b.ReportMetric(float64(our.median())/float64(opens.median()), "x-floor")
	b.ReportMetric(float64(our.median())/float64(their.median()), "x-peer")
}
