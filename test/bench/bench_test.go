// Package bench has the benchmarks of whole programs. Each measures this tree's build, the best known peer, and a floor
// in the same run, in random order, so that other load on the machine slows all of them alike.
//
// GPU_CDI_PLUGIN_BINARY names another build of gpu-cdi-plugin, such as one of an earlier commit. It is measured in the
// same run; its metrics begin with "before-".
package bench

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// rounds is how often each contender runs, freshRounds where each run needs a fresh root file system.
const (
	rounds      = 41
	freshRounds = 21
)

// The prefixes of metrics.
const (
	before = "before-"
	peer   = "peer-"
	floor  = "floor-"
)

var shared *suite.Suite

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }

// build is a build of gpu-cdi-plugin, installed in a node's root.
type build struct {
	prefix  string // of its metrics
	program string // on this machine
	name    string // in the node's /usr/bin
}

// install installs what the benchmarks run in a node's root: this tree's programs, the build that GPU_CDI_PLUGIN_BINARY
// names, and others.
func install(t testing.TB, root string, others ...string) []build {
	t.Helper()
	builds := []build{{"", shared.Program(t, "gpu-cdi-plugin"), "gpu-cdi-plugin"}}
	suite.Install(t, root, append(others, builds[0].program, shared.Program(t, "prestart-hook"))...)
	if program := os.Getenv("GPU_CDI_PLUGIN_BINARY"); program != "" {
		builds = append(builds, build{before, program, "gpu-cdi-plugin-before"})
		testenv.Must(t, image.AddProgram(root, program, "/usr/bin/gpu-cdi-plugin-before"))
	}
	return builds
}

// drivers are the drivers that starts and specs are measured on. NVIDIA's programs read all 4,322 lines of mig-minors,
// which a driver with MIG has, once for each GPU.
var drivers = map[string]func(testing.TB) *sim.Node{
	"with MIG minors": func(t testing.TB) *sim.Node { return simtest.Node(t, "dgx-h100") },
	"without MIG minors": func(t testing.TB) *sim.Node {
		n := simtest.Node(t, "dgx1-v100")
		testenv.Must(t, os.Remove(filepath.Join(n.Root(), "proc/driver/nvidia-caps/mig-minors")))
		return n
	},
}

// floorProgram builds the program that only opens the driver's library, and returns its path and its argument on a
// node.
func floorProgram(t testing.TB, n *sim.Node) (program, library string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "floor")
	env := append(os.Environ(), "CGO_CFLAGS=-Wno-deprecated-declarations", "CGO_LDFLAGS=-Wl,-z,lazy")
	proc.Must(t, 0,
		proc.Cmd{Args: []string{"go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./floor"}, Env: env})
	h, err := host.New(n.Root(), "", "")
	testenv.Must(t, err)
	if library, err = nvml.Find(h, ""); err != nil {
		t.Fatal(err)
	}
	return program, library
}

// contender is one of the things that are compared.
type contender struct {
	name   string
	prefix string // of its metrics
	// prepare, if set, comes before every run and is not measured.
	prepare func() error
	// run returns a duration for each column of the comparison.
	run   func() []time.Duration
	times [][]time.Duration // by column
}

// commandRun returns a run of a program to its end.
func commandRun(b *testing.B, cmd proc.Cmd) func() []time.Duration {
	return func() []time.Duration { return []time.Duration{proc.Must(b, 0, cmd).Wall} }
}

// compare runs the contenders in turn, in random order, after one round that is not counted, and logs the times.
func compare(b *testing.B, rounds int, columns []string, all []*contender) {
	b.Helper()
	for _, c := range all {
		c.times = make([][]time.Duration, len(columns))
	}
	for round := range rounds + 1 {
		for _, i := range rand.Perm(len(all)) {
			c := all[i]
			if c.prepare != nil {
				testenv.Must(b, c.prepare())
			}
			for column, took := range c.run() {
				if round > 0 {
					c.times[column] = append(c.times[column], took)
				}
			}
		}
	}
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "\t\tmedian ms\tquartiles ms\tminimum ms\t\n")
	for _, c := range all {
		for column, times := range c.times {
			if len(times) > 0 {
				fmt.Fprintf(w, "%s\t%s\t%.2f\t%.2f to %.2f\t%.2f\t\n", c.name, columns[column], ms(median(times)),
					ms(percentile(times, 25)), ms(percentile(times, 75)), ms(slices.Min(times)))
			}
		}
	}
	w.Flush()
	b.Logf("%s, %d runs of each\n%s", b.Name(), rounds, text.String())
}

// reportTimes reports the medians of a column, and the ratios of each build's to the floor's and the peer's.
func reportTimes(b *testing.B, column int, name string, all []*contender) {
	b.ReportMetric(0, "ns/op")
	medians := map[string]float64{}
	for _, c := range all {
		if column < len(c.times) && len(c.times[column]) > 0 {
			medians[c.prefix] = ms(median(c.times[column]))
			b.ReportMetric(medians[c.prefix], c.prefix+name+"ms")
		}
	}
	for _, prefix := range []string{"", before} {
		for _, other := range []string{floor, peer} {
			if medians[prefix] > 0 && medians[other] > 0 {
				b.ReportMetric(medians[prefix]/medians[other], prefix+name+"x-"+strings.TrimSuffix(other, "-"))
			}
		}
	}
}

func median[T cmp.Ordered](samples []T) T { return percentile(samples, 50) }

// percentile is the value that so many hundredths of the samples do not exceed.
func percentile[T cmp.Ordered](samples []T, hundredths int) T {
	sorted := slices.Sorted(slices.Values(samples))
	return sorted[(len(sorted)-1)*hundredths/100]
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
