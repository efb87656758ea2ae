package day

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/sim"
)

// days is how many days each figure is the mean of.
const days = 10

// machines are those that the days are simulated on.
var machines = []string{"dgx1-v100", "dgx-h100", "pcie-quad", "hgx-16"}

// loadMachine is a machine of the simulation with the default weights.
func loadMachine(name string) (*machine, *allocator.Node, error) {
	simulated, err := sim.LoadMachine(name)
	if err != nil {
		return nil, nil, err
	}
	s := simulated.Snapshot("580.126.09")
	n, err := allocator.NewNode(s, allocator.DefaultWeights())
	if err != nil {
		return nil, nil, err
	}
	return newMachine(name, len(s.Devices), n.Pair), n, nil
}

// policy is one that is compared.
type policy struct {
	name   string
	choose chooser
}

func policies(m *machine, n *allocator.Node) []policy {
	return []policy{
		{"topology", ask(n, allocator.Topology)},
		{"partition", ask(n, allocator.Partition)},
		{"greedy", m.greedy},
		{"random", random(1)},
	}
}

// ask is a policy of the product. What it answered once it is not asked again.
func ask(n *allocator.Node, p allocator.Policy) chooser {
	type question struct {
		available set
		size      int
	}
	answers := map[question]set{}
	place := map[string]int{}
	for i, g := range n.GPUs() {
		place[g.UUID] = i
	}
	return func(available set, size int) (set, error) {
		if answer, ok := answers[question{available, size}]; ok {
			return answer, nil
		}
		r := allocator.Request{Size: size}
		for _, i := range available.indices() {
			r.Available = append(r.Available, n.GPUs()[i].UUID)
		}
		c, err := n.Choose(p, r)
		if err != nil {
			return 0, err
		}
		var answer set
		for _, id := range c.IDs {
			answer |= 1 << place[id]
		}
		answers[question{available, size}] = answer
		return answer, nil
	}
}

// result is what a policy did on a machine, day by day.
type result struct {
	policy string
	days   []map[int]*tally
}

// simulateAll has the results of each machine.
func simulateAll(share float64) (map[string][]result, error) {
	all := map[string][]result{}
	for _, name := range machines {
		results, err := simulate(name, share)
		if err != nil {
			return nil, err
		}
		all[name] = results
	}
	return all, nil
}

// simulate runs the days on a machine with every policy: the same days for each.
func simulate(name string, share float64) ([]result, error) {
	m, n, err := loadMachine(name)
	if err != nil {
		return nil, err
	}
	var results []result
	for _, p := range policies(m, n) {
		r := result{policy: p.name}
		for seed := range uint64(days) {
			tallies, err := run(m, requests(seed, m.gpus, share), p.choose)
			if err != nil {
				return nil, fmt.Errorf("simulate a day of %s with %s: %w", name, p.name, err)
			}
			r.days = append(r.days, tallies)
		}
		results = append(results, r)
	}
	return results, nil
}

// sizes are the sizes of the requests, and scored those that have a score: with one GPU there is no pair.
func (r *result) sizes() []int  { return slices.Sorted(maps.Keys(r.days[0])) }
func (r *result) scored() []int { return r.sizes()[1:] }

// sum adds up the requests of some sizes, of the days from one to before another.
func (r *result) sum(from, to int, sizes []int) (t tally) {
	for _, day := range r.days[from:to] {
		for _, s := range sizes {
			t.asked += day[s].asked
			t.refused += day[s].refused
			t.ofNow += day[s].ofNow
			t.ofEmpty += day[s].ofEmpty
		}
	}
	return t
}

func (t tally) given() float64 { return float64(t.asked - t.refused) }

// lead is by how much the first result is better than the second, in hundredths of the best on an empty machine: the mean
// over the days, and its standard error.
func lead(a, b *result, sizes []int) (mean, standardError float64) {
	var leads []float64
	for i := range a.days {
		ours, theirs := a.sum(i, i+1, sizes), b.sum(i, i+1, sizes)
		leads = append(leads, 100*(ours.ofEmpty/ours.given()-theirs.ofEmpty/theirs.given()))
	}
	n := float64(len(leads))
	for _, l := range leads {
		mean += l / n
	}
	for _, l := range leads {
		standardError += (l - mean) * (l - mean)
	}
	return mean, math.Sqrt(standardError / (n - 1) / n)
}

// writeTable writes the table of docs/allocator.md.
func writeTable(w io.Writer, all map[string][]result) {
	writeHeader(w)
	for _, name := range machines {
		writeMachine(w, name, all[name])
	}
}

func writeHeader(w io.Writer) {
	fmt.Fprintln(w, "| machine | size | refused | topology | partition | greedy | random | topology − partition |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|---|---|")
}

// writeMachine writes a row for each size, and one for all. A request of one GPU is only among those that were refused.
func writeMachine(w io.Writer, name string, results []result) {
	scored := results[0].scored()
	for _, s := range scored {
		writeRow(w, name, fmt.Sprint(s), results, []int{s}, []int{s})
	}
	writeRow(w, "**"+name+"**", "all", results, results[0].sizes(), scored)
}

func writeRow(w io.Writer, name, size string, results []result, asked, scored []int) {
	t := results[0].sum(0, days, asked)
	fmt.Fprintf(w, "| %s | %s | %.0f %% |", name, size, 100*float64(t.refused)/float64(t.asked))
	for i := range results {
		t := results[i].sum(0, days, scored)
		fmt.Fprintf(w, " %.2f / %.2f |", 100*t.ofNow/t.given(), 100*t.ofEmpty/t.given())
	}
	mean, standardError := lead(&results[0], &results[1], scored)
	fmt.Fprintf(w, " %+.2f ± %.2f |\n", mean, standardError)
}
