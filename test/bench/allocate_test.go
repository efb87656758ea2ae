package bench

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkAllocate measures Allocate over each plugin's own socket, with CDI names. First calls are each for a set
// of GPUs that was not allocated before, as most calls of Kubernetes are; repeated calls are for one set. What was
// allocated before must not make a call slower.
func BenchmarkAllocate(b *testing.B) {
	all := newPlugins(b, simtest.Node(b, "hgx-16"))
	for _, n := range []int{1, 4, 8} {
		b.Run(fmt.Sprintf("first call, %d of 16", n), func(b *testing.B) {
			compareCalls(b, all, func(p *plugin) call { return firstAllocations(p, n) })
		})
		b.Run(fmt.Sprintf("repeated call, %d of 16", n), func(b *testing.B) {
			compareCalls(b, all, func(p *plugin) call {
				p.start()
				ids := p.ids()[:n]
				return call{do: func() error { _, err := p.allocate(ids...); return err }}
			})
		})
	}
	b.Run("after 10,000 calls, 8 of 16", func(b *testing.B) {
		compareCalls(b, all, func(p *plugin) call {
			p.start()
			for _, set := range choices(p.ids(), 8)[:10_000] {
				_, err := p.allocate(set...)
				testenv.Must(b, err)
			}
			ids := p.ids()[:8]
			return call{do: func() error { _, err := p.allocate(ids...); return err }}
		})
	})
}

// firstAllocations allocates another set of n GPUs each time. When there are no more, the plugin is restarted.
func firstAllocations(p *plugin, n int) call {
	var sets [][]string
	var next []string
	return call{
		prepare: func() {
			if len(sets) == 0 {
				testenv.Must(p.t, p.removeState())
				p.start()
				sets = choices(p.ids(), n)
			}
			next, sets = sets[0], sets[1:]
		},
		do: func() error { _, err := p.allocate(next...); return err },
	}
}

// choices are all sets of n of the devices, in random order.
func choices(ids []string, n int) (sets [][]string) {
	for chosen := range uint(1) << len(ids) {
		if bits.OnesCount(chosen) != n {
			continue
		}
		var set []string
		for i, id := range ids {
			if chosen>>i&1 == 1 {
				set = append(set, id)
			}
		}
		sets = append(sets, set)
	}
	rand.Shuffle(len(sets), func(i, j int) { sets[i], sets[j] = sets[j], sets[i] })
	return sets
}

// BenchmarkPreferred measures GetPreferredAllocation over each plugin's own socket, for half of the GPUs, by one caller
// and by eight at once.
func BenchmarkPreferred(b *testing.B) {
	for _, machine := range []string{"dgx-h100", "hgx-16"} {
		all := newPlugins(b, simtest.Node(b, machine))
		gpus := len(all[0].machine.GPUs)
		name := fmt.Sprintf("%d of %d", gpus/2, gpus)
		b.Run(name, func(b *testing.B) {
			compareCalls(b, all, func(p *plugin) call { return preferred(p, gpus/2) })
		})
		b.Run(name+", 8 callers", func(b *testing.B) { compareCallers(b, all, gpus/2) })
		for _, p := range all {
			p.stop()
		}
	}
}

// preferred requests the best n GPUs of all, which are in another order each time. Several callers may do it at once.
func preferred(p *plugin, n int) call {
	p.start()
	ids := p.ids()
	return call{do: func() error {
		shuffled := slices.Clone(ids)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		_, err := p.client.GetPreferredAllocation(p.t.Context(), &v1beta1.PreferredAllocationRequest{
			ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: shuffled, AllocationSize: int32(n)},
			},
		})
		return err
	}}
}

// call is a call to a plugin. prepare, if set, comes before it and is not measured.
type call struct {
	prepare func()
	do      func() error
}

// empty is the floor: a call without content.
func (p *plugin) empty() error {
	_, err := p.client.GetDevicePluginOptions(p.t.Context(), &v1beta1.Empty{})
	return err
}

// compareCalls compares a call to each plugin, beside empty calls on the same connection. The calls alternate with the
// empty ones; the plugins take turns in blocks of calls, since the first call on an idle connection takes longer.
func compareCalls(b *testing.B, all []*plugin, newCall func(*plugin) call) {
	b.Helper()
	const (
		blocks    = 16
		blockSize = 64
		blockTime = 100 * time.Millisecond // for calls that take milliseconds
	)
	calls := make([]call, len(all))
	for i, p := range all {
		calls[i] = newCall(p)
	}
	took, empty := make([][]time.Duration, len(all)), make([][]time.Duration, len(all))
	for b.Loop() {
		for range blocks {
			for _, i := range rand.Perm(len(all)) {
				begin := time.Now()
				for n := 0; n < blockSize && time.Since(begin) < blockTime; n++ {
					if calls[i].prepare != nil {
						calls[i].prepare()
					}
					empty[i] = append(empty[i], timed(b, all[i].empty))
					took[i] = append(took[i], timed(b, calls[i].do))
				}
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	theirs := median(took[len(all)-1])
	for i, p := range all {
		b.ReportMetric(micros(median(took[i])), p.prefix+"p50-µs")
		b.ReportMetric(micros(percentile(took[i], 99)), p.prefix+"p99-µs")
		b.ReportMetric(micros(median(empty[i])), p.prefix+"empty-µs")
		b.ReportMetric(float64(median(took[i]))/float64(median(empty[i])), p.prefix+"x-empty")
		if p.prefix != peer {
			b.ReportMetric(float64(median(took[i]))/float64(theirs), p.prefix+"x-peer")
		}
	}
}

// compareCallers compares eight callers at once with one. Where one call after the other is served, each of eight
// callers waits eight times as long as one alone; x-one-times-8 is relative to that.
func compareCallers(b *testing.B, all []*plugin, n int) {
	b.Helper()
	calls := make([]call, len(all))
	for i, p := range all {
		calls[i] = preferred(p, n)
	}
	one, eight := make([][]time.Duration, len(all)), make([][]time.Duration, len(all))
	for b.Loop() {
		for _, i := range rand.Perm(len(all)) {
			one[i] = append(one[i], callTogether(b, 1, calls[i].do)...)
			eight[i] = append(eight[i], callTogether(b, 8, calls[i].do)...)
		}
	}
	b.ReportMetric(0, "ns/op")
	theirs := median(eight[len(all)-1])
	for i, p := range all {
		b.ReportMetric(micros(median(eight[i])), p.prefix+"p50-µs")
		b.ReportMetric(micros(percentile(eight[i], 99)), p.prefix+"p99-µs")
		b.ReportMetric(float64(median(eight[i]))/float64(8*median(one[i])), p.prefix+"x-one-times-8")
		if p.prefix != peer {
			b.ReportMetric(float64(median(eight[i]))/float64(theirs), p.prefix+"x-peer")
		}
	}
}

// callTogether makes calls from several callers for a quarter of a second, and returns how long each took.
func callTogether(b *testing.B, callers int, do func() error) []time.Duration {
	b.Helper()
	took := make([][]time.Duration, callers)
	var all sync.WaitGroup
	begin := time.Now()
	for i := range took {
		all.Go(func() {
			for time.Since(begin) < 250*time.Millisecond {
				took[i] = append(took[i], timed(b, do))
			}
		})
	}
	all.Wait()
	return slices.Concat(took...)
}

// timed is how long a call takes. It may run in several goroutines, so an error does not end the benchmark at once.
func timed(b *testing.B, do func() error) time.Duration {
	b.Helper()
	begin := time.Now()
	if err := do(); err != nil {
		b.Error(err)
	}
	return time.Since(begin)
}
