package allocation

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the table in docs/allocator.md")

const (
	document = "../../docs/allocator.md"
	// load is the share of the GPUs that is requested on average, in the table.
	load = 0.7

	tableBegins = "<!-- the table: go test ./test/allocation -update -->\n"
	tableEnds   = "<!-- the table ends -->\n"
)

func TestDays(t *testing.T) {
	for _, share := range []float64{0.5, load, 0.9} {
		t.Run(fmt.Sprintf("load %.1f", share), func(t *testing.T) {
			all, err := simulateAll(share)
			testenv.Must(t, err)
			for name, results := range all {
				checkDays(t, name, results)
			}
			checkDefault(t, all)
			if share == load {
				checkTable(t, all)
			}
		})
	}
}

// checkDays checks what makes the figures comparable: every policy has the same refusals, and topology always gives the
// best set there is.
func checkDays(t *testing.T, name string, results []result) {
	t.Helper()
	for day := range days {
		for size, topology := range results[0].days[day] {
			if size > 1 && topology.ofPossible != topology.granted() {
				t.Errorf("%s: %v of %v requests for %d GPUs got the best possible set", name, topology.ofPossible,
					topology.granted(), size)
			}
			for _, r := range results {
				if got := r.days[day][size]; got.requests != topology.requests || got.refused != topology.refused {
					t.Errorf("%s: %s refused %d of %d requests for %d GPUs, topology %d of %d", name, r.policy,
						got.refused, got.requests, size, topology.refused, topology.requests)
				}
			}
		}
	}
}

// checkDefault checks why topology is the default: on average over all machines it retains more of the best score than
// partition.
func checkDefault(t *testing.T, all map[string][]result) {
	t.Helper()
	leads := 0.0
	for _, results := range all {
		mean, _ := lead(&results[0], &results[1], results[0].scored())
		leads += mean
	}
	t.Logf("topology leads by %.2f hundredths on average", leads/float64(len(all)))
	if leads < 0 {
		t.Error("partition is better than the default")
	}
}

// checkTable compares the table in the document with the results.
func checkTable(t *testing.T, all map[string][]result) {
	t.Helper()
	text, err := os.ReadFile(document)
	testenv.Must(t, err)
	before, rest, found := strings.Cut(string(text), tableBegins)
	old, after, ends := strings.Cut(rest, tableEnds)
	if !found || !ends {
		t.Fatalf("%s has no marks for the table", document)
	}
	var table strings.Builder
	writeTable(&table, all)
	if *update {
		updated := before + tableBegins + table.String() + tableEnds + after
		testenv.Must(t, os.WriteFile(document, []byte(updated), 0o644))
		return
	}
	if diff := cmp.Diff(table.String(), old); diff != "" {
		t.Errorf("%s (-simulated +written):\n%s", document, diff)
	}
}

// BenchmarkDay logs the table by machine: the testing package cuts a log of more than ten lines.
func BenchmarkDay(b *testing.B) {
	for _, name := range machines {
		b.Run(name, func(b *testing.B) {
			var results []result
			for b.Loop() {
				var err error
				if results, err = simulate(name, load); err != nil {
					b.Fatal(err)
				}
			}
			var table strings.Builder
			writeHeader(&table)
			writeMachine(&table, name, results)
			b.Log("\n" + table.String())
		})
	}
}
