package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkAtRest measures the processor time of a minute in which nothing happens: the plugin serves a kubelet, and no
// container has a GPU. The floor only receives the driver's events; the simulated driver looks for them twice a second.
func BenchmarkAtRest(b *testing.B) {
	for name, c := range map[string]struct {
		profiles []string // of the MIG devices of each GPU
		count    int
		flags    []string
	}{
		"8 GPUs":         {nil, 8, nil},
		"56 MIG devices": {slices.Repeat([]string{"1g.10gb"}, 7), 56, []string{"--mig-strategy", "single"}},
	} {
		b.Run(name, func(b *testing.B) {
			node := simtest.Node(b, "dgx-h100")
			for i := range node.Machine().GPUs {
				if c.profiles != nil {
					testenv.Must(b, node.SetMIG(i, c.profiles))
				}
			}
			all := newPlugins(b, node, c.flags...)
			program, library := floorProgram(b, node)
			processes := map[string]int{floor: startWaiting(b, "events", program, library)}
			for _, p := range all {
				p.count = c.count
				p.start()
				processes[p.prefix] = p.process.Pid()
			}
			time.Sleep(20 * time.Second) // until what follows a start is over
			cost := map[string]time.Duration{}
			for b.Loop() {
				for prefix, pid := range processes {
					cost[prefix] = -scheduled(b, pid)
				}
				time.Sleep(time.Minute)
				for prefix, pid := range processes {
					cost[prefix] += scheduled(b, pid)
				}
			}
			b.ReportMetric(0, "ns/op")
			for prefix, used := range cost {
				b.ReportMetric(ms(used), prefix+"ms/min")
			}
		})
	}
}

// scheduled is how long the threads of a process have run on processors; see sched-stats.rst in the kernel's
// documentation. Threads that have ended do not count: a Go program's seldom end.
func scheduled(b *testing.B, pid int) (sum time.Duration) {
	b.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	testenv.Must(b, err)
	for _, file := range files {
		data, err := os.ReadFile(file)
		testenv.Must(b, err)
		nanoseconds, err := strconv.ParseInt(strings.Fields(string(data))[0], 10, 64)
		testenv.Must(b, err)
		sum += time.Duration(nanoseconds)
	}
	return sum
}
