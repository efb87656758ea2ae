package bench

import (
	"context"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/atomicfile"
)

// BenchmarkAllocate is P1 of the targets: Allocate over each plugin's own socket, answered with CDI names. Ours also looks
// whether the spec on disk has them, and mounts the allocation's descriptor; the peer does neither.
//
// Where the same GPUs are asked for again, as a node's few GPUs are again and again, ours has the answer ready, and its
// descriptor written. Anew, with others each time, it has neither: that is the worst case. The descriptor is on the node's
// disk, since the kubelet mounts it again after a boot; x-write is beside the writing of one such file alone.
func BenchmarkAllocate(b *testing.B) {
	our, their := plugins(b, "dgx-h100")
	our.start()
	their.start()
	for _, n := range []int{1, 4, 8} {
		b.Run(fmt.Sprintf("%d of %d again", n, len(our.machine.GPUs)), func(b *testing.B) {
			benchmarkCall(b, our, their, allocate([][]string{our.ids()[:n]}))
		})
	}
	our.end()
	their.end()
	our, their = plugins(b, "hgx-16")
	our.start()
	their.start()
	b.Run("8 of 16 anew", func(b *testing.B) {
		p50 := benchmarkCall(b, our, their, allocate(halves(our.ids())))
		write := writing(b)
		b.ReportMetric(micros(write), "write-µs")
		b.ReportMetric(float64(p50)/float64(write), "x-write")
	})
}

// writing is how long it takes to write a descriptor so that it outlasts a power cut, on the disk that the node is on.
func writing(b *testing.B) time.Duration {
	b.Helper()
	dir := b.TempDir()
	var took []time.Duration
	for n := range 200 {
		begin := time.Now()
		if err := atomicfile.Write(filepath.Join(dir, strconv.Itoa(n)), make([]byte, 2<<10), 0o644); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begin))
	}
	return median(took)
}

// allocate asks for one list of GPUs after the other.
func allocate(lists [][]string) call {
	var requests []*v1beta1.AllocateRequest
	for _, ids := range lists {
		requests = append(requests, &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}}})
	}
	next := 0
	return func(ctx context.Context, c v1beta1.DevicePluginClient) error {
		_, err := c.Allocate(ctx, requests[next%len(requests)])
		next++
		return err
	}
}

// halves are all choices of half of the GPUs, in any order.
func halves(ids []string) (lists [][]string) {
	for chosen := range uint(1) << len(ids) {
		if bits.OnesCount(chosen) != len(ids)/2 {
			continue
		}
		var list []string
		for i, id := range ids {
			if chosen>>i&1 == 1 {
				list = append(list, id)
			}
		}
		lists = append(lists, list)
	}
	rand.Shuffle(len(lists), func(i, j int) { lists[i], lists[j] = lists[j], lists[i] })
	return lists
}

// BenchmarkPreferred is P2 of the targets: GetPreferredAllocation over each plugin's own socket, of all GPUs that there are,
// and the same with eight callers at once.
func BenchmarkPreferred(b *testing.B) {
	for _, machine := range []string{"dgx-h100", "hgx-16"} {
		our, their := plugins(b, machine)
		our.start()
		their.start()
		call := preferred(our.ids(), len(our.machine.GPUs)/2)
		name := fmt.Sprintf("%s/%d of %d", machine, len(our.machine.GPUs)/2, len(our.machine.GPUs))
		b.Run(name, func(b *testing.B) { benchmarkCall(b, our, their, call) })
		b.Run(name+"/8 callers", func(b *testing.B) { benchmarkCallers(b, our, their, call) })
		our.end()
		their.end()
	}
}

// call is something that is asked of a plugin.
type call func(context.Context, v1beta1.DevicePluginClient) error

// empty is the floor: a call without anything in it.
func empty(ctx context.Context, c v1beta1.DevicePluginClient) error {
	_, err := c.GetDevicePluginOptions(ctx, &v1beta1.Empty{})
	return err
}

// preferred asks for so many of the GPUs, which come in another order each time. Several may ask at once.
func preferred(ids []string, n int) call {
	return func(ctx context.Context, c v1beta1.DevicePluginClient) error {
		shuffled := slices.Clone(ids)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		_, err := c.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{
			ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: shuffled, AllocationSize: int32(n)}},
		})
		return err
	}
}

// benchmarkCall compares a call to our plugin with the same to NVIDIA's, each beside empty calls on the same connection. The
// calls alternate with the empty ones, and the plugins in blocks: a connection that was just in use is faster than another.
// It returns the median of ours.
func benchmarkCall(b *testing.B, our, their *serving, c call) (p50 time.Duration) {
	b.Helper()
	ours, theirs := &exchange{client: our.client}, &exchange{client: their.client}
	for i := 0; b.Loop(); i++ {
		turns := []*exchange{ours, theirs}
		turns[i%2].block(b, c)
		turns[(i+1)%2].block(b, c)
	}
	b.ReportMetric(0, "ns/op")
	ours.report(b, "")
	theirs.report(b, "peer-")
	b.ReportMetric(float64(median(ours.calls))/float64(median(theirs.calls)), "x-peer")
	return median(ours.calls)
}

// exchange are calls on one connection, and empty ones.
type exchange struct {
	client       v1beta1.DevicePluginClient
	calls, empty []time.Duration
}

// block is 64 calls, or as many as fit into a tenth of a second.
func (x *exchange) block(b *testing.B, c call) {
	b.Helper()
	for begin := time.Now(); time.Since(begin) < 100*time.Millisecond; {
		for range 8 {
			x.empty = append(x.empty, timed(b, x.client, empty))
			x.calls = append(x.calls, timed(b, x.client, c))
		}
		if len(x.calls)%64 == 0 {
			return
		}
	}
}

func (x *exchange) report(b *testing.B, prefix string) {
	b.ReportMetric(micros(median(x.calls)), prefix+"p50-µs")
	b.ReportMetric(micros(percentile(x.calls, 99)), prefix+"p99-µs")
	b.ReportMetric(micros(median(x.empty)), prefix+"empty-µs")
	b.ReportMetric(float64(median(x.calls))/float64(median(x.empty)), prefix+"x-empty")
}

// benchmarkCallers has eight callers at once beside one, each of which waits for its answer before it asks again. On a
// machine that does one thing at a time, each waits eight times as long as one does alone: that is x-one-times-8.
func benchmarkCallers(b *testing.B, our, their *serving, c call) {
	var one, eight, oneEmpty, eightEmpty, peer []time.Duration
	for b.Loop() {
		one = append(one, together(b, 1, our.client, c)...)
		eight = append(eight, together(b, 8, our.client, c)...)
		oneEmpty = append(oneEmpty, together(b, 1, our.client, empty)...)
		eightEmpty = append(eightEmpty, together(b, 8, our.client, empty)...)
		peer = append(peer, together(b, 8, their.client, c)...)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(micros(median(eight)), "p50-µs")
	b.ReportMetric(micros(percentile(eight, 99)), "p99-µs")
	b.ReportMetric(float64(median(eight))/float64(8*median(one)), "x-one-times-8")
	b.ReportMetric(micros(median(eightEmpty)), "empty-µs")
	b.ReportMetric(float64(median(eightEmpty))/float64(8*median(oneEmpty)), "empty-x-one-times-8")
	b.ReportMetric(micros(median(peer)), "peer-p50-µs")
	b.ReportMetric(micros(percentile(peer, 99)), "peer-p99-µs")
	b.ReportMetric(float64(median(eight))/float64(median(peer)), "x-peer")
}

// together has so many callers ask again and again for a quarter of a second, and returns how long each call took.
func together(b *testing.B, callers int, client v1beta1.DevicePluginClient, c call) []time.Duration {
	b.Helper()
	took := make([][]time.Duration, callers)
	var all sync.WaitGroup
	begin := time.Now()
	for i := range took {
		all.Go(func() {
			for time.Since(begin) < 250*time.Millisecond {
				took[i] = append(took[i], timed(b, client, c))
			}
		})
	}
	all.Wait()
	return slices.Concat(took...)
}

// timed is how long a call takes. Others may be under way, so a failed one does not end the benchmark at once.
func timed(b *testing.B, client v1beta1.DevicePluginClient, c call) time.Duration {
	b.Helper()
	begin := time.Now()
	if err := c(b.Context(), client); err != nil {
		b.Error(err)
	}
	return time.Since(begin)
}
