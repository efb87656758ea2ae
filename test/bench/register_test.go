package bench

import (
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkStart measures from the start of the process until the plugin calls Register, and until it has returned the
// first preferred allocation, which must be right each time. A CDI spec is written each time, as after a boot; at the
// first start on a node the plugin's other files are written too. The floor is a Go program that opens the driver's
// library and exits.
func BenchmarkStart(b *testing.B) {
	for name, node := range drivers {
		b.Run(name, func(b *testing.B) { benchmarkStart(b, node(b), (*plugin).stop) })
	}
	b.Run("first on the node", func(b *testing.B) {
		benchmarkStart(b, drivers["with MIG minors"](b), func(p *plugin) {
			testenv.Must(b, p.removeState())
		})
	})
}

func benchmarkStart(b *testing.B, n *sim.Node, prepare func(*plugin)) {
	b.Helper()
	program, library := floorProgram(b, n)
	all := []*contender{{
		name: "a Go program that opens NVML", prefix: floor,
		run: commandRun(b, proc.Cmd{Args: []string{program, library}}),
	}}
	for _, p := range newPlugins(b, n) {
		all = append(all, &contender{
			name: p.cmd.Args[0], prefix: p.prefix,
			prepare: func() error { prepare(p); return nil },
			run: func() []time.Duration {
				registered := p.start()
				p.checkPreferred()
				return []time.Duration{registered, time.Since(p.begun)}
			},
		})
	}
	for b.Loop() {
		compare(b, rounds, []string{"registered", "first preferred allocation"}, all)
	}
	reportTimes(b, 0, "registered-", all)
	reportTimes(b, 1, "preferred-", all)
}

// BenchmarkRestart measures from the kubelet's new socket until the plugin calls Register again. The floor is a
// connection to this tree's plugin on which its list is read: a registration takes one of these and one to the kubelet.
// Its worst case shows how much of a late registration may be due to the machine.
func BenchmarkRestart(b *testing.B) {
	const (
		restarts = 250
		each     = 4 // restarts for each of the peer's, which takes longer
	)
	all := newPlugins(b, drivers["with MIG minors"](b))
	for _, p := range all {
		p.start()
	}
	took := map[*plugin][]time.Duration{}
	var connections []time.Duration
	for b.Loop() {
		for range restarts {
			for _, i := range rand.Perm(len(all)) {
				p := all[i]
				took[p] = append(took[p], restartKubelet(p))
				for range each - 1 {
					if p.prefix != peer {
						took[p] = append(took[p], restartKubelet(p))
					}
				}
			}
			for range each {
				connections = append(connections, connect(b, all[0].socket))
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(median(connections)), floor+"p50-ms")
	b.ReportMetric(ms(percentile(connections, 100)), floor+"worst-ms")
	theirs := median(took[all[len(all)-1]])
	for _, p := range all {
		b.ReportMetric(ms(median(took[p])), p.prefix+"p50-ms")
		b.ReportMetric(ms(percentile(took[p], 99)), p.prefix+"p99-ms")
		b.ReportMetric(ms(percentile(took[p], 100)), p.prefix+"worst-ms")
		if p.prefix != peer {
			b.ReportMetric(float64(median(took[p]))/float64(median(connections)), p.prefix+"x-floor")
			b.ReportMetric(float64(median(took[p]))/float64(theirs), p.prefix+"x-peer")
		}
	}
}

// restartKubelet restarts a plugin's kubelet, and returns the time from its new socket until the plugin calls Register.
func restartKubelet(p *plugin) time.Duration {
	const down = 10 * time.Millisecond // so that a plugin can notice that the kubelet is gone
	p.kubelet.Stop()
	time.Sleep(down)
	begin := time.Now()
	p.kubelet.Start()
	return p.awaitRegistration(begin)
}

// connect is how long it takes to connect to a plugin and to read its list.
func connect(b *testing.B, socket string) time.Duration {
	b.Helper()
	begin := time.Now()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(b, err)
	defer conn.Close()
	stream, err := v1beta1.NewDevicePluginClient(conn).ListAndWatch(b.Context(), &v1beta1.Empty{})
	testenv.Must(b, err)
	if _, err := stream.Recv(); err != nil {
		b.Fatal(err)
	}
	return time.Since(begin)
}
