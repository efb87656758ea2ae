package admission

import (
	"fmt"
	"testing"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// benchPool returns n healthy devices, spread over so many NUMA nodes.
func benchPool(n, numa int) *Pool {
	r := model.Resource{Name: "example.com/a", Connected: true}
	for i := range n {
		r.Devices = append(
			r.Devices,
			model.Device{ID: fmt.Sprintf("%05d", i), Healthy: true, NUMA: []int{i * numa / n}},
		)
	}
	p := NewPool(r.Name)
	p.Set(r)
	return p
}

// The cost of a choice does not depend on how many devices pods hold.
func BenchmarkPlan(b *testing.B) {
	for _, held := range []int{0, 9000} {
		p := benchPool(10000, 2)
		for i := range held {
			p.Hold("other", "main", []string{fmt.Sprintf("%05d", i)})
		}
		for name, r := range map[string]Request{
			"any": {Count: 1}, "aligned": {Count: 1, Affinity: 2}, "preferred": {Count: 1, Prefers: true},
		} {
			b.Run(fmt.Sprintf("%s/held=%d", name, held), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					plan, err := p.Plan(r)
					testenv.Must(b, err)
					p.Hold("pod", "main", plan.Pick(nil))
					p.Release("pod", "main", plan.chosen)
				}
			})
		}
	}
}

func BenchmarkHints(b *testing.B) {
	p := benchPool(128, 16)
	for b.Loop() {
		hints, err := p.Hints(onMachine(1<<16-1), Request{Count: 20})
		if err != nil || len(hints) < 60000 {
			b.Fatal(len(hints), err)
		}
	}
}

// Three resources on 16 NUMA nodes: the kubelet would merge 2^48 combinations.
func BenchmarkMerge(b *testing.B) {
	p := benchPool(128, 16)
	var resources [][]Hint
	for _, held := range []int{0, 20, 40} {
		p.Hold("other", "main", []string{fmt.Sprintf("%05d", held)})
		hints, err := p.Hints(onMachine(1<<16-1), Request{Count: 20 + held})
		testenv.Must(b, err)
		resources = append(resources, hints)
	}
	t := Topology{Policy: PolicyBestEffort, Machine: 1<<16 - 1}
	for b.Loop() {
		if nodes, err := t.Merge(resources); err != nil || nodes == 0 {
			b.Fatal(nodes, err)
		}
	}
}
