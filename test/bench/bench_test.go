// Package bench has the benchmarks of whole programs, each beside its floor and the best known peer in the same run:
// the rounds are interleaved, so that whatever else the machine does slows all of them.
package bench

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
)

// rounds is how often each variant runs, freshRounds where each run needs a fresh root file system.
const (
	rounds      = 41
	freshRounds = 21
)

var shared *suite.Suite

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }

// variant is one of the things that are compared.
type variant struct {
	name string
	cmd  proc.Cmd
	// run, if there is one, does something else than to run cmd to its end, and returns how long that took.
	run func() time.Duration
	// prepare, if there is one, comes before every run and is not counted.
	prepare func() error
	// times has the length of every run.
	times []time.Duration
}

func (v *variant) once(b *testing.B) time.Duration {
	b.Helper()
	if v.run != nil {
		return v.run()
	}
	return proc.Must(b, 0, v.cmd).Wall
}

// median of the variant's times.
func (v *variant) median() time.Duration { return median(v.times) }

func median[T cmp.Ordered](samples []T) T { return percentile(samples, 50) }

// percentile is what so many hundredths of the samples do not exceed.
func percentile[T cmp.Ordered](samples []T, hundredths int) T {
	sorted := slices.Sorted(slices.Values(samples))
	return sorted[(len(sorted)-1)*hundredths/100]
}

// beyond is what a variant takes longer than another: the median of the rounds' differences, which is steadier than the
// difference of the medians on a machine that others use as well.
func (v *variant) beyond(floor *variant) time.Duration {
	more := &variant{}
	for i := range v.times {
		more.times = append(more.times, v.times[i]-floor.times[i])
	}
	return more.median()
}

// quartiles of the variant's times.
func (v *variant) quartiles() (low, high time.Duration) {
	sorted := slices.Sorted(slices.Values(v.times))
	return sorted[len(sorted)/4], sorted[len(sorted)*3/4]
}

// measure runs the variants in turn, every round in an order by chance, after one round that is not counted.
func measure(b *testing.B, rounds int, variants []*variant) {
	b.Helper()
	for round := range rounds + 1 {
		for _, i := range rand.Perm(len(variants)) { // so that none has always the same before it
			v := variants[i]
			if v.prepare != nil {
				if err := v.prepare(); err != nil {
					b.Fatal(err)
				}
			}
			took := v.once(b)
			if round > 0 {
				v.times = append(v.times, took)
			}
		}
	}
}

// logTable prints what was measured.
func logTable(b *testing.B, title string, variants []*variant) {
	b.Helper()
	var text strings.Builder
	fmt.Fprintf(&text, "%s, %d runs of each, interleaved\n", title, len(variants[0].times))
	w := tabwriter.NewWriter(&text, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "variant\tmedian ms\tquartiles ms\tleast ms\t\n")
	for _, v := range variants {
		low, high := v.quartiles()
		fmt.Fprintf(w, "%s\t%.2f\t%.2f to %.2f\t%.2f\t\n", v.name, ms(v.median()), ms(low), ms(high), ms(slices.Min(v.times)))
	}
	w.Flush()
	b.Log(text.String())
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
