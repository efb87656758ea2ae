package day

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the table in docs/allocator.md anew")

const (
	document = "../../docs/allocator.md"
	// load is the share of the GPUs that is asked for, in the table.
	load = 0.7

	tableBegins = "<!-- the table: go test ./test/day -update -->\n"
	tableEnds   = "<!-- the table ends -->\n"
)

func TestDay(t *testing.T) {
	for _, share := range []float64{0.5, load, 0.9} {
		t.Run(fmt.Sprintf("load %.1f", share), func(t *testing.T) {
			all, err := simulateAll(share)
			if err != nil {
				t.Fatal(err)
			}
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

// checkDays: the figures are only worth something if the days are the same whatever is chosen, and if topology is what it
// says.
func checkDays(t *testing.T, name string, results []result) {
	t.Helper()
	for day := range days {
		for size, want := range results[0].days[day] {
			if given := want.given(); size > 1 && want.ofNow != given {
				t.Errorf("%s: %v of %v requests of size %d were given the best there was", name, want.ofNow, given, size)
			}
			for _, r := range results {
				if got := r.days[day][size]; got.asked != want.asked || got.refused != want.refused {
					t.Errorf("%s: %s refused %d of %d requests of size %d, topology %d of %d", name, r.policy, got.refused,
						got.asked, size, want.refused, want.asked)
				}
			}
		}
	}
}

// checkDefault holds the default policy to what it was chosen for: at any load it keeps more of the best score than
// partition, over all machines.
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

// checkTable guards the document: its table is what the days give.
func checkTable(t *testing.T, all map[string][]result) {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), tableBegins)
	old, after, ends := strings.Cut(rest, tableEnds)
	if !found || !ends {
		t.Fatalf("%s has no place for the table", document)
	}
	var table strings.Builder
	writeTable(&table, all)
	if *update {
		anew := before + tableBegins + table.String() + tableEnds + after
		if err := os.WriteFile(document, []byte(anew), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(table.String(), old); diff != "" {
		t.Errorf("%s (-simulated +written):\n%s", document, diff)
	}
}

// BenchmarkDay prints the table, each machine's rows on their own: of ten lines and more the rest would be cut.
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
