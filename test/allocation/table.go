package allocation

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/sim"
)

// days is the number of days over which each figure is averaged.
const days = 10

// machines are the simulated machines of the table.
var machines = []string{"dgx1-v100", "dgx-h100", "pcie-quad", "hgx-16"}

// result has the tallies of a policy on a machine, by day and size.
type result struct {
	policy string
	days   []map[int]*tally
}

// simulateAll returns the results of each machine.
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

// simulate runs the same days of a machine with every policy.
func simulate(name string, share float64) ([]result, error) {
	simulated, err := sim.LoadMachine(name)
	if err != nil {
		return nil, err
	}
	s := simulated.Snapshot(sim.DefaultDriver)
	node, err := allocator.NewGPUs(s, allocator.DefaultWeights())
	if err != nil {
		return nil, err
	}
	m := newMachine(name, len(s.Devices), node.Pair)
	var results []result
	for _, policy := range []struct {
		name   string
		choose chooser
	}{
		{"topology", chooseWith(node, allocator.Topology)},
		{"partition", chooseWith(node, allocator.Partition)},
		{"greedy", m.chooseGreedily},
		{"random", chooseRandomly(1)},
	} {
		r := result{policy: policy.name}
		for seed := range uint64(days) {
			tallies, err := simulateDay(m, requests(seed, m.gpus, share), policy.choose)
			if err != nil {
				return nil, fmt.Errorf("simulate a day of %s with %s: %w", name, policy.name, err)
			}
			r.days = append(r.days, tallies)
		}
		results = append(results, r)
	}
	return results, nil
}

// chooseWith returns a chooser that calls the allocator. It caches the results, since the same few requests occur
// thousands of times a day.
func chooseWith(n *allocator.GPUs, p allocator.Policy) chooser {
	type question struct {
		available set
		size      int
	}
	answers := map[question]set{}
	uuids := n.UUIDs()
	return func(available set, size int) (set, error) {
		q := question{available, size}
		if answer, ok := answers[q]; ok {
			return answer, nil
		}
		r := allocator.Request{Size: size}
		for _, i := range available.indices() {
			r.Available = append(r.Available, uuids[i])
		}
		c, err := n.Choose(p, r)
		if err != nil {
			return 0, err
		}
		for _, id := range c.IDs {
			answers[q] |= 1 << slices.Index(uuids, id)
		}
		return answers[q], nil
	}
}

// sizes returns the sizes of the requests. Requests for one GPU have no score, since there is no pair.
func (r *result) sizes() []int  { return slices.Sorted(maps.Keys(r.days[0])) }
func (r *result) scored() []int { return r.sizes()[1:] }

// sum adds up the tallies of some sizes over the days in [from, to).
func (r *result) sum(from, to int, sizes []int) (t tally) {
	for _, day := range r.days[from:to] {
		for _, s := range sizes {
			t.requests += day[s].requests
			t.refused += day[s].refused
			t.ofPossible += day[s].ofPossible
			t.ofEmpty += day[s].ofEmpty
		}
	}
	return t
}

// lead returns how much better result a is than b, in hundredths of the best score on an empty machine: the mean over
// the days, and its standard error.
func lead(a, b *result, sizes []int) (mean, standardError float64) {
	var leads []float64
	for i := range a.days {
		x, y := a.sum(i, i+1, sizes), b.sum(i, i+1, sizes)
		leads = append(leads, 100*(x.ofEmpty/x.granted()-y.ofEmpty/y.granted()))
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

// writeMachine writes a row for each size and one for all sizes. In the latter, requests for one GPU only count as
// accepted or refused.
func writeMachine(w io.Writer, name string, results []result) {
	scored := results[0].scored()
	for _, s := range scored {
		writeRow(w, name, fmt.Sprint(s), results, []int{s}, []int{s})
	}
	writeRow(w, "**"+name+"**", "all", results, results[0].sizes(), scored)
}

func writeRow(w io.Writer, name, size string, results []result, counted, scored []int) {
	t := results[0].sum(0, days, counted)
	fmt.Fprintf(w, "| %s | %s | %.0f %% |", name, size, 100*float64(t.refused)/float64(t.requests))
	for i := range results {
		t := results[i].sum(0, days, scored)
		fmt.Fprintf(w, " %.2f / %.2f |", 100*t.ofPossible/t.granted(), 100*t.ofEmpty/t.granted())
	}
	mean, standardError := lead(&results[0], &results[1], scored)
	fmt.Fprintf(w, " %+.2f ± %.2f |\n", mean, standardError)
}
