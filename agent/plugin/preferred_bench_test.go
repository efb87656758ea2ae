package plugin

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// benchMachine returns what a benchmark's plugin serves: the GPUs of a simulated machine, each as N replicas if "*N"
// follows its name.
func benchMachine(machine string) (*gpu.Snapshot, resource.Resource, error) {
	name, times, shared := strings.Cut(machine, "*")
	m, err := sim.LoadMachine(name)
	if err != nil {
		return nil, resource.Resource{}, err
	}
	c := resource.Config{Resource: gpus, MIGStrategy: resource.MIGNone}
	if shared {
		n, err := strconv.Atoi(times)
		if err != nil {
			return nil, resource.Resource{}, err
		}
		c.Sharing.TimeSlicing.Resources = []resource.SharingRule{{Name: gpus, Replicas: n}}
	}
	s := m.Snapshot("580.126.09")
	built, _, err := resource.Build(s, c)
	if err != nil {
		return nil, resource.Resource{}, err
	}
	return s, built[0], nil
}

// processOf starts a plugin that serves a machine, in a process of its own.
func processOf(b *testing.B, machine string) (*kubelettest.Kubelet, *kubelettest.Endpoint, resource.Resource) {
	b.Helper()
	_, r, err := benchMachine(machine)
	testenv.Must(b, err)
	k := kubelettest.New(b)
	k.Start()
	return k, process(b, k, "cdi-cri:"+machine), r
}

// BenchmarkPreferred measures P2: GetPreferredAllocation over the unix socket of a plugin in a process of its own, with
// other devices available each time. The floor is an empty call, alternating with it.
func BenchmarkPreferred(b *testing.B) {
	for _, machine := range []string{"dgx-h100", "dgx1-v100", "hgx-16"} {
		_, e, r := processOf(b, machine)
		for size := 1; size <= len(r.Devices); size++ {
			b.Run(fmt.Sprintf("%s/%d of %d", machine, size, len(r.Devices)), func(b *testing.B) {
				next := requests(&r, size)
				var calls, empty []time.Duration
				for b.Loop() {
					empty = append(empty, timeEmpty(b, e.Client))
					calls = append(calls, timePreferred(b, e.Client, next()))
				}
				reportBeside(b, "empty", calls, empty)
			})
		}
	}
}

// BenchmarkPreferredReplicas sends all of 512 IDs, some 30 KB. So here the floor is a call that carries the same bytes
// and does nothing with them.
func BenchmarkPreferredReplicas(b *testing.B) {
	const machine = "dgx-h100*64"
	k, e, r := processOf(b, machine)
	for _, size := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprintf("%d of %d", size, len(r.Devices)), func(b *testing.B) {
			conn, err := grpc.NewClient("unix:"+ownSocket(k), grpc.WithTransportCredentials(insecure.NewCredentials()))
			testenv.Must(b, err)
			b.Cleanup(func() { _ = conn.Close() })
			req := preferred(idsOf(&r), size)
			var calls, carried []time.Duration
			for b.Loop() {
				begin := time.Now()
				const method = v1beta1.DevicePlugin_GetDevicePluginOptions_FullMethodName
				testenv.Must(b, conn.Invoke(b.Context(), method, req, &v1beta1.DevicePluginOptions{}))
				carried = append(carried, time.Since(begin))
				calls = append(calls, timePreferred(b, e.Client, req))
			}
			reportBeside(b, "carried", calls, carried)
		})
	}
}

// BenchmarkPreferredCallers compares eight concurrent callers with one. Each waits for a response before its next call,
// so on a machine with one processor calls of eight take at least eight times as long: "x-one-times-8" is their
// duration divided by that, and "empty-x-one-times-8" the same for empty calls.
func BenchmarkPreferredCallers(b *testing.B) {
	for _, machine := range []string{"dgx-h100", "hgx-16"} {
		b.Run(machine, func(b *testing.B) {
			_, e, r := processOf(b, machine)
			call := func(next func() *v1beta1.PreferredAllocationRequest) time.Duration {
				return timePreferred(b, e.Client, next())
			}
			none := func(func() *v1beta1.PreferredAllocationRequest) time.Duration { return timeEmpty(b, e.Client) }
			var one, eight, oneEmpty, eightEmpty []time.Duration
			for b.Loop() {
				one = append(one, together(1, &r, call)...)
				oneEmpty = append(oneEmpty, together(1, &r, none)...)
				eight = append(eight, together(8, &r, call)...)
				eightEmpty = append(eightEmpty, together(8, &r, none)...)
			}
			b.ReportMetric(micros(percentile(one, 50)), "one-p50-µs")
			b.ReportMetric(micros(percentile(eight, 50)), "eight-p50-µs")
			b.ReportMetric(micros(percentile(eight, 99)), "eight-p99-µs")
			b.ReportMetric(float64(percentile(eight, 50))/float64(8*percentile(one, 50)), "x-one-times-8")
			emptyRatio := float64(percentile(eightEmpty, 50)) / float64(8*percentile(oneEmpty, 50))
			b.ReportMetric(emptyRatio, "empty-x-one-times-8")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// together runs concurrent callers of a hundred calls each, and returns how long each call took.
func together(
	callers int, r *resource.Resource, call func(next func() *v1beta1.PreferredAllocationRequest) time.Duration,
) []time.Duration {
	const each = 100
	took := make([]time.Duration, callers*each)
	var all sync.WaitGroup
	for c := range callers {
		next := requests(r, 1+c%len(r.Devices))
		all.Go(func() {
			for i := range each {
				took[c*each+i] = call(next)
			}
		})
	}
	all.Wait()
	return took
}

// requests returns a generator of requests for so many devices. Each request has other devices available.
func requests(r *resource.Resource, size int) func() *v1beta1.PreferredAllocationRequest {
	random := rand.New(rand.NewPCG(uint64(len(r.Devices)), uint64(size)))
	ids := idsOf(r)
	return func() *v1beta1.PreferredAllocationRequest {
		random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		return preferred(append([]string(nil), ids[:size+random.IntN(len(ids)-size+1)]...), size)
	}
}

func idsOf(r *resource.Resource) []string {
	var ids []string
	for i := range r.Devices {
		ids = append(ids, r.Devices[i].ID)
	}
	return ids
}

func preferred(available []string, size int) *v1beta1.PreferredAllocationRequest {
	return &v1beta1.PreferredAllocationRequest{ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: available, AllocationSize: int32(size)},
	}}
}

func timeEmpty(b *testing.B, c v1beta1.DevicePluginClient) time.Duration {
	begin := time.Now()
	if _, err := c.GetDevicePluginOptions(b.Context(), &v1beta1.Empty{}); err != nil {
		b.Error(err)
	}
	return time.Since(begin)
}

func timePreferred(b *testing.B, c v1beta1.DevicePluginClient, req *v1beta1.PreferredAllocationRequest) time.Duration {
	begin := time.Now()
	if _, err := c.GetPreferredAllocation(b.Context(), req); err != nil {
		b.Error(err)
	}
	return time.Since(begin)
}

// reportBeside reports the durations of calls and their ratio to a floor.
func reportBeside(b *testing.B, floorName string, calls, floor []time.Duration) {
	p50, least := percentile(calls, 50), percentile(floor, 50)
	b.ReportMetric(micros(p50), "p50-µs")
	b.ReportMetric(micros(percentile(calls, 99)), "p99-µs")
	b.ReportMetric(micros(least), floorName+"-µs")
	b.ReportMetric(float64(p50)/float64(least), "x-"+floorName)
	b.ReportMetric(0, "ns/op")
}
