package plugin

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// percentile returns a percentile of the samples.
func percentile(samples []time.Duration, hundredths int) time.Duration {
	slices.Sort(samples)
	return samples[(len(samples)-1)*hundredths/100]
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// benchPlugin is an environment variable with which this program is a plugin, until the end of its input. Its value is
// DIR:STRATEGIES[:MACHINE]: the directory of the sockets, a comma-separated list, and the machine of benchMachine;
// without a machine the plugin serves eight GPUs.
const benchPlugin = "GPU_CDI_BENCH_PLUGIN"

func TestMain(m *testing.M) {
	if setting, ok := os.LookupEnv(benchPlugin); ok {
		if err := serveBenchmark(setting); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func serveBenchmark(setting string) error {
	dir, strategies, _ := strings.Cut(setting, ":")
	strategies, machine, _ := strings.Cut(strategies, ":")
	o := Options{Dir: dir, Log: quiet}
	for s := range strings.SplitSeq(strategies, ",") {
		o.Allocate.Strategies = append(o.Allocate.Strategies, resource.Strategy(s))
	}
	served, connected := gpusOf(8), (*allocator.GPUs)(nil)
	if machine != "" {
		snapshot, r, err := benchMachine(machine)
		if err != nil {
			return err
		}
		if connected, err = allocator.NewGPUs(snapshot, allocator.DefaultWeights()); err != nil {
			return err
		}
		served = r
	}
	p, err := New(o)
	if err != nil {
		return err
	}
	if err := p.Update([]resource.Resource{served}, connected); err != nil {
		return err
	}
	stop, err := serveCanned(filepath.Join(dir, cannedSocket), &canned{from: p.endpoints[served.Name].server})
	if err != nil {
		return err
	}
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return p.Run(ctx)
}

// canned answers Allocate with the plugin's first response for the same number of devices. It measures what only the
// messages cost.
type canned struct {
	v1beta1.UnimplementedDevicePluginServer

	from      v1beta1.DevicePluginServer
	responses sync.Map // by the number of devices
}

// cannedSocket is canned's socket, in the plugin's directory.
const cannedSocket = "canned.sock"

// GetDevicePluginOptions is as empty as the plugin's.
func (c *canned) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return new(AllocateOptions).calls(), nil
}

// Allocate returns the stored response. It stores the first one.
func (c *canned) Allocate(ctx context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	count := len(r.GetContainerRequests()[0].GetDevicesIds())
	if resp, ok := c.responses.Load(count); ok {
		return resp.(*v1beta1.AllocateResponse), nil
	}
	resp, err := c.from.Allocate(ctx, r)
	if err == nil {
		c.responses.Store(count, resp)
	}
	return resp, err
}

func serveCanned(path string, c *canned) (stop func(), err error) {
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest))
	v1beta1.RegisterDevicePluginServer(s, c)
	go func() { _ = s.Serve(l) }()
	return s.Stop, nil
}

// BenchmarkAllocate is P1: Allocate over the unix socket, of a plugin in a process of its own. The floor is an empty
// call, GetDevicePluginOptions, on the same connection, alternating with it. x-empty-messages is the same ratio for a
// server with stored responses: the cost of the messages. In "new" each call is for another set of GPUs.
func BenchmarkAllocate(b *testing.B) {
	for _, strategies := range []string{"cdi-cri", "cdi-cri,cdi-annotations,envvar"} {
		for _, n := range []int{1, 4, 8} {
			b.Run(fmt.Sprintf("%s/%d", strategies, n), func(b *testing.B) {
				var ids []string
				for i := range n {
					ids = append(ids, uuid(i))
				}
				againstEmpty(b, strategies, func(int) []string { return ids })
			})
		}
	}
	b.Run("new", func(b *testing.B) {
		againstEmpty(b, "cdi-cri", func(i int) []string { return subset(i%255 + 1) })
	})
}

// subset are the GPUs whose bits are set.
func subset(bits int) []string {
	var ids []string
	for n := range 8 {
		if bits>>n&1 == 1 {
			ids = append(ids, uuid(n))
		}
	}
	return ids
}

func againstEmpty(b *testing.B, strategies string, ids func(i int) []string) {
	k := kubelettest.New(b)
	k.Start()
	e := process(b, k, strategies)
	plugin, ready := &pair{
		client: e.Client,
	}, &pair{
		client: v1beta1.NewDevicePluginClient(dial(b, filepath.Join(k.Dir, cannedSocket))),
	}
	for i := 0; b.Loop(); i++ {
		p := plugin
		if i/block%2 == 1 {
			p = ready
		}
		p.round(b, allocate(ids(i)...))
	}
	b.ReportMetric(micros(percentile(plugin.calls, 50)), "p50-µs")
	b.ReportMetric(micros(percentile(plugin.calls, 99)), "p99-µs")
	b.ReportMetric(micros(percentile(plugin.empty, 50)), "empty-µs")
	b.ReportMetric(plugin.ratio(), "x-empty")
	if len(ready.calls) > 0 {
		b.ReportMetric(ready.ratio(), "x-empty-messages")
	}
	b.ReportMetric(0, "ns/op")
}

// block is how many calls go to the plugin and then to canned, in turn: a connection that was just in use is faster
// than another.
const block = 64

// pair are calls on one connection, each beside an empty one.
type pair struct {
	client       v1beta1.DevicePluginClient
	empty, calls []time.Duration
}

func (p *pair) round(b *testing.B, r *v1beta1.AllocateRequest) {
	begin := time.Now()
	_, err := p.client.GetDevicePluginOptions(b.Context(), &v1beta1.Empty{})
	testenv.Must(b, err)
	middle := time.Now()
	_, err = p.client.Allocate(b.Context(), r)
	testenv.Must(b, err)
	p.empty, p.calls = append(p.empty, middle.Sub(begin)), append(p.calls, time.Since(middle))
}

func (p *pair) ratio() float64 {
	return float64(percentile(p.calls, 50)) / float64(percentile(p.empty, 50))
}

func dial(b *testing.B, socket string) *grpc.ClientConn {
	b.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(b, err)
	b.Cleanup(func() { _ = conn.Close() })
	return conn
}

// process is a plugin in a process of its own, until the benchmark ends.
func process(b *testing.B, k *kubelettest.Kubelet, strategies string) *kubelettest.Endpoint {
	b.Helper()
	self, err := os.Executable()
	testenv.Must(b, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), benchPlugin+"="+k.Dir+":"+strategies)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	testenv.Must(b, err)
	testenv.Must(b, cmd.Start())
	b.Cleanup(func() {
		_ = input.Close()
		testenv.Must(b, cmd.Wait())
	})
	return k.WaitRegistered(gpus)
}

// BenchmarkStart is the plugin's part of P3: from nothing to registered, with the list of eight GPUs read. The floor is
// a connection to the plugin on which the list is read: a registration takes one of these and one to the kubelet.
func BenchmarkStart(b *testing.B) {
	k := kubelettest.New(b)
	k.Start()
	var starts, floor []time.Duration
	for b.Loop() {
		begin := time.Now()
		p := start(b, optionsFor(k), gpusOf(8))
		e := k.WaitRegistered(gpus)
		starts = append(starts, time.Since(begin))
		floor = append(floor, connection(b, k, e))
		testenv.Must(b, p.stop())
		k.WaitGone(gpus)
	}
	report(b, starts, floor)
}

// BenchmarkRestart is P4: from the kubelet's new socket to registered again, with the list read. The floor is
// BenchmarkStart's; the worst of both shows what of a late registration is the machine's.
func BenchmarkRestart(b *testing.B) {
	for name, limit := range map[string]int{"one resource": 1, "four resources": 4} {
		b.Run(name, func(b *testing.B) {
			k := kubelettest.New(b)
			k.Start()
			all := []resource.Resource{gpusOf(8), migOf(8), replicasOf(8, 4), replicasOf(8, 8)}[:limit]
			for i := range all {
				all[i].Name = fmt.Sprintf("nvidia.com/r%d", i)
			}
			start(b, optionsFor(k), all...)
			waitAll(k, len(all))
			var times, floor []time.Duration
			for b.Loop() {
				k.Stop()
				k.Start()
				begin := time.Now()
				e := waitAll(k, len(all))
				times = append(times, time.Since(begin))
				floor = append(floor, connection(b, k, e))
			}
			report(b, times, floor)
		})
	}
}

// waitAll waits for the resources r0, r1 and so on, and returns the plugin of the last.
func waitAll(k *kubelettest.Kubelet, n int) *kubelettest.Endpoint {
	var e *kubelettest.Endpoint
	for i := range n {
		e = k.WaitRegistered(fmt.Sprintf("nvidia.com/r%d", i))
	}
	return e
}

// connection is how long it takes to connect to a plugin and to read its list.
func connection(b *testing.B, k *kubelettest.Kubelet, e *kubelettest.Endpoint) time.Duration {
	b.Helper()
	begin := time.Now()
	conn := dial(b, filepath.Join(k.Dir, e.Request.GetEndpoint()))
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	stream, err := v1beta1.NewDevicePluginClient(conn).ListAndWatch(ctx, &v1beta1.Empty{})
	testenv.Must(b, err)
	_, err = stream.Recv()
	testenv.Must(b, err)
	took := time.Since(begin)
	testenv.Must(b, conn.Close())
	return took
}

func report(b *testing.B, times, floor []time.Duration) {
	p50, least := percentile(times, 50), percentile(floor, 50)
	b.ReportMetric(micros(p50)/1000, "p50-ms")
	b.ReportMetric(micros(percentile(times, 100))/1000, "worst-ms")
	b.ReportMetric(micros(least)/1000, "connect-ms")
	b.ReportMetric(micros(percentile(floor, 100))/1000, "worst-connect-ms")
	b.ReportMetric(float64(p50)/float64(least), "x-connect")
	b.ReportMetric(0, "ns/op")
}
