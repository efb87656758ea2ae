package plugin

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/plugin/plugintest"
	"gpu-cdi-plugin/plugin/resource"
)

// percentile is the time that so many hundredths of the samples do not exceed.
func percentile(samples []time.Duration, hundredths int) time.Duration {
	slices.Sort(samples)
	return samples[(len(samples)-1)*hundredths/100]
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// knownSpecs is a spec that has every name, and looks each up.
type knownSpecs map[string]bool

func (k knownSpecs) SpecHas(names ...string) error {
	for _, n := range names {
		if !k[n] {
			return fmt.Errorf("no %s", n)
		}
	}
	return nil
}

// benchPlugin, in the environment, is the directory that this program serves eight GPUs in, as a plugin is a process of its
// own; the list of its strategies follows after a colon, and after another the machine of benchMachine that it serves instead.
// It ends with its input.
const benchPlugin = "GPU_CDI_BENCH_PLUGIN"

func TestMain(m *testing.M) {
	if told, ok := os.LookupEnv(benchPlugin); ok {
		if err := serveBenchmark(told); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func serveBenchmark(told string) error {
	dir, strategies, _ := strings.Cut(told, ":")
	strategies, machine, _ := strings.Cut(strategies, ":")
	known := knownSpecs{}
	for i := range 8 {
		known[gpus+"="+uuid(i)] = true
	}
	o := Options{Dir: dir, Log: quiet, Answers: Answers{Kind: gpus, Specs: known, AllocationDir: filepath.Join(dir, "allocations")}}
	for s := range strings.SplitSeq(strategies, ",") {
		o.Answers.Strategies = append(o.Answers.Strategies, Strategy(s))
	}
	served := gpusOf(8)
	if machine != "" {
		snapshot, r, err := benchMachine(machine)
		if err != nil {
			return err
		}
		node, err := allocator.NewNode(snapshot, allocator.DefaultWeights())
		if err != nil {
			return err
		}
		served = r
		o.Answers.Preference.Node = func() *allocator.Node { return node }
	}
	p, err := New(o)
	if err != nil {
		return err
	}
	if err := p.Update([]resource.Resource{served}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return p.Run(ctx)
}

// BenchmarkAllocate is P1: Allocate over the unix socket, of a plugin in a process of its own. The floor is an empty call,
// GetDevicePluginOptions, on the same connection, alternating with it. Everything that an answer needs is on: the spec is
// asked, the allocation's file is mounted. In "new" it is another allocation each time, whose file has to be written.
func BenchmarkAllocate(b *testing.B) {
	for _, strategies := range []string{"cdi-cri", "cdi-cri,cdi-annotations,envvar"} {
		for _, n := range []int{1, 4, 8} {
			b.Run(fmt.Sprintf("%s/%d", strategies, n), func(b *testing.B) {
				var ids []string
				for i := range n {
					ids = append(ids, uuid(i))
				}
				againstEmpty(b, strategies, func(*plugintest.Kubelet, int) []string { return ids })
			})
		}
	}
	b.Run("new", func(b *testing.B) {
		againstEmpty(b, "cdi-cri", func(k *plugintest.Kubelet, i int) []string {
			if i%255 == 0 {
				_ = os.RemoveAll(filepath.Join(k.Dir, "allocations"))
			}
			return subset(i%255 + 1)
		})
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

func againstEmpty(b *testing.B, strategies string, ids func(k *plugintest.Kubelet, i int) []string) {
	k := plugintest.New(b)
	k.Start()
	e := process(b, k, strategies)
	var calls, empty []time.Duration
	for i := 0; b.Loop(); i++ {
		request := allocate(ids(k, i)...)
		begin := time.Now()
		if _, err := e.Client.GetDevicePluginOptions(b.Context(), &v1beta1.Empty{}); err != nil {
			b.Fatal(err)
		}
		middle := time.Now()
		if _, err := e.Client.Allocate(b.Context(), request); err != nil {
			b.Fatal(err)
		}
		empty, calls = append(empty, middle.Sub(begin)), append(calls, time.Since(middle))
	}
	p50, floor := percentile(calls, 50), percentile(empty, 50)
	b.ReportMetric(micros(p50), "p50-µs")
	b.ReportMetric(micros(percentile(calls, 99)), "p99-µs")
	b.ReportMetric(micros(floor), "empty-µs")
	b.ReportMetric(float64(p50)/float64(floor), "x-empty")
	b.ReportMetric(0, "ns/op")
}

// process is a plugin in a process of its own, until the benchmark ends.
func process(b *testing.B, k *plugintest.Kubelet, strategies string) *plugintest.Endpoint {
	b.Helper()
	self, err := os.Executable()
	must(b, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), benchPlugin+"="+k.Dir+":"+strategies)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	must(b, err)
	must(b, cmd.Start())
	b.Cleanup(func() {
		_ = input.Close()
		must(b, cmd.Wait())
	})
	return k.WaitRegistered(gpus)
}

// BenchmarkStart is the plugin's part of P3: from nothing to registered, with the list of eight GPUs read. The floor is an
// empty call on the connection that results.
func BenchmarkStart(b *testing.B) {
	k := plugintest.New(b)
	k.Start()
	var starts, empty []time.Duration
	for b.Loop() {
		begin := time.Now()
		p := start(b, optionsFor(k), gpusOf(8))
		e := k.WaitRegistered(gpus)
		starts = append(starts, time.Since(begin))
		empty = append(empty, emptyCall(b, e))
		must(b, p.stop())
		k.WaitGone(gpus)
	}
	report(b, starts, empty)
}

// BenchmarkRestart is P4: from the kubelet's new socket to registered again, with the list read.
func BenchmarkRestart(b *testing.B) {
	for name, limit := range map[string]int{"one resource": 1, "four resources": 4} {
		b.Run(name, func(b *testing.B) {
			k := plugintest.New(b)
			k.Start()
			all := []resource.Resource{gpusOf(8), migOf(8), replicasOf(8, 4), replicasOf(8, 8)}[:limit]
			for i := range all {
				all[i].Name = fmt.Sprintf("nvidia.com/r%d", i)
			}
			start(b, optionsFor(k), all...)
			waitAll(k, len(all))
			var times, empty []time.Duration
			for b.Loop() {
				k.Stop()
				k.Start()
				begin := time.Now()
				e := waitAll(k, len(all))
				times = append(times, time.Since(begin))
				empty = append(empty, emptyCall(b, e))
			}
			report(b, times, empty)
		})
	}
}

// waitAll waits for the resources r0, r1 and so on, and returns the plugin of the last.
func waitAll(k *plugintest.Kubelet, n int) *plugintest.Endpoint {
	var e *plugintest.Endpoint
	for i := range n {
		e = k.WaitRegistered(fmt.Sprintf("nvidia.com/r%d", i))
	}
	return e
}

// emptyCall is how long an empty call takes on a connection that has done one before.
func emptyCall(b *testing.B, e *plugintest.Endpoint) time.Duration {
	var took time.Duration
	for range 2 {
		begin := time.Now()
		if _, err := e.Client.GetDevicePluginOptions(context.Background(), &v1beta1.Empty{}); err != nil {
			b.Fatal(err)
		}
		took = time.Since(begin)
	}
	return took
}

func report(b *testing.B, times, empty []time.Duration) {
	p50, floor := percentile(times, 50), percentile(empty, 50)
	b.ReportMetric(micros(p50)/1000, "p50-ms")
	b.ReportMetric(micros(percentile(times, 100))/1000, "worst-ms")
	b.ReportMetric(micros(floor), "empty-µs")
	b.ReportMetric(float64(p50)/float64(floor), "x-empty")
	b.ReportMetric(0, "ns/op")
}
