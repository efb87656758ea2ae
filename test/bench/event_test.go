package bench

import (
	"bufio"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkEvent measures from an XID until the kubelet has a list with that GPU as unhealthy. "behind" is the time
// since another program received the same event from the driver. NVIDIA's plugin is measured beside it.
func BenchmarkEvent(b *testing.B) {
	const (
		rounds       = 20
		xid          = 95
		notSupported = 3 // NVML_ERROR_NOT_SUPPORTED
	)
	node := drivers["with MIG minors"](b)
	// An older driver: otherwise its verdict, that the GPU needs nothing, would overrule the code.
	testenv.Must(b, node.Fail("nvmlDeviceGetFieldValues", sim.AnyGPU, notSupported))
	all := newPlugins(b, node)
	program, library := floorProgram(b, node)
	received := startReceiving(b, program, library)
	took, behind := map[*plugin][]time.Duration{}, map[*plugin][]time.Duration{}
	for b.Loop() {
		for range rounds {
			for _, p := range all {
				testenv.Must(b, p.removeState())
				p.start()
				time.Sleep(200 * time.Millisecond) // until it waits for events
				for i := range p.machine.GPUs {
					begin := time.Now()
					testenv.Must(b, node.XID(i, xid, nil))
					p.kubelet.WaitFor(resource, hasUnhealthy(p.machine.GPUs[i].UUID))
					end := time.Now()
					took[p] = append(took[p], end.Sub(begin))
					behind[p] = append(behind[p], end.Sub(received()))
				}
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	for _, p := range all {
		b.ReportMetric(ms(median(took[p])), p.prefix+"p50-ms")
		b.ReportMetric(ms(median(behind[p])), p.prefix+"behind-p50-ms")
		b.ReportMetric(ms(percentile(behind[p], 99)), p.prefix+"behind-p99-ms")
	}
}

func hasUnhealthy(id string) func([]*v1beta1.Device) bool {
	return func(list []*v1beta1.Device) bool {
		for _, d := range list {
			if d.GetID() == id {
				return d.GetHealth() != v1beta1.Healthy
			}
		}
		return false
	}
}

// startReceiving starts the floor, which receives events. The function returns the time of the next one.
func startReceiving(b *testing.B, program, library string) func() time.Time {
	b.Helper()
	in, end, err := os.Pipe()
	testenv.Must(b, err)
	out, write, err := os.Pipe()
	testenv.Must(b, err)
	p, err := proc.Start(proc.Cmd{Args: []string{program, library, "events"}, Stdin: in}, write)
	testenv.Must(b, err)
	_ = write.Close()
	b.Cleanup(func() {
		_ = end.Close()
		p.Code()
	})
	lines := bufio.NewReader(out)
	return func() time.Time {
		line, err := lines.ReadString('\n')
		testenv.Must(b, err)
		ns, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
		testenv.Must(b, err)
		return time.Unix(0, ns)
	}
}
