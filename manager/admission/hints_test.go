package admission

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpu-cdi-plugin/manager/model"
)

func preferred(nodes ...int) Hint { return Hint{Nodes: NodesOf(nodes...), Preferred: true} }

func possible(nodes ...int) Hint { return Hint{Nodes: NodesOf(nodes...)} }

func TestHints(t *testing.T) {
	const two = Nodes(3) // a machine with the nodes 0 and 1
	plain := NewPool(resource)
	plain.Set(listed("a", "b"))
	holding := func(p *Pool, ids ...string) *Pool {
		p.Hold("other", "main", ids)
		return p
	}
	for name, test := range map[string]struct {
		pool    *Pool
		machine Nodes
		request Request
		want    []Hint
	}{
		"no device has NUMA nodes":       {plain, two, Request{Count: 1}, nil},
		"nothing is requested":           {onNodes(1, 0, 1), two, Request{}, nil},
		"the resource is not registered": {NewPool(resource), two, Request{Count: 1}, nil},
		"one device on one node":         {onNodes(1, 0), two, Request{Count: 1}, []Hint{preferred(0)}},
		"one device on each node": {
			onNodes(1, 0, 1), two, Request{Count: 1}, []Hint{preferred(0), preferred(1), possible(0, 1)},
		},
		"two of one device on each node": {onNodes(1, 0, 1), two, Request{Count: 2}, []Hint{preferred(0, 1)}},
		"two of two devices on each node": {
			onNodes(2, 0, 1), two, Request{Count: 2}, []Hint{preferred(0), preferred(1), possible(0, 1)},
		},
		"one node would do if no pod had a device": {
			holding(onNodes(2, 0, 1), "a0", "b0"), two, Request{Count: 2}, []Hint{possible(0, 1)},
		},
		"more than there are": {onNodes(2, 0, 1), two, Request{Count: 6}, []Hint{}},
		"more than are free":  {holding(onNodes(2, 0, 1), "a0", "b0"), two, Request{Count: 3}, []Hint{}},
		"an unknown reusable device says nothing": {
			onNodes(1, 0, 1), two,
			Request{Count: 1, Reusable: []string{"gone"}},
			[]Hint{preferred(0), preferred(1), possible(0, 1)},
		},
		"a reusable device": {
			holding(onNodes(1, 0), "a0"), 15, Request{Count: 1, Reusable: []string{"a0"}}, []Hint{preferred(0)},
		},
		"a reusable device and a free one on another node": {
			holding(onNodes(1, 0, 1), "a0"), 15, Request{Count: 2, Reusable: []string{"a0"}}, []Hint{preferred(0, 1)},
		},
		"all reusable devices must be on the nodes": {
			holding(onNodes(2, 0, 1), "a0", "b0"), two,
			Request{Count: 1, Reusable: []string{"a0", "b0"}},
			[]Hint{possible(0, 1)},
		},
		"34 nodes of which two have devices": {
			onNodes(1, 0, 33), 1<<34 - 1, Request{Count: 1}, []Hint{preferred(0), preferred(33), possible(0, 33)},
		},
		"a node that the machine does not have is left out": {
			onNodes(1, 0, 63, 99), two, Request{Count: 1}, []Hint{preferred(0)},
		},
		"nodes with gaps": {
			onNodes(1, 3, 5), NodesOf(0, 3, 5, 7), Request{Count: 1}, []Hint{preferred(3), preferred(5), possible(3, 5)},
		},
		"no device is on a node that the machine has": {onNodes(1, 7), two, Request{Count: 1}, []Hint{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := test.pool.Hints(onMachine(test.machine), test.request)
			if diff := cmp.Diff(test.want, got); diff != "" || err != nil {
				t.Errorf("error %v, hints (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestTooManyNodesAreAnError(t *testing.T) {
	var nodes []int
	for n := range maxNodes {
		nodes = append(nodes, 2*n)
	}
	if hints, err := onNodes(1, nodes...).Hints(onMachine(1<<40-1), Request{Count: maxNodes}); err != nil ||
		len(hints) != 1 {
		t.Errorf("%d hints of %d nodes: %v", len(hints), maxNodes, err)
	}
	_, err := onNodes(1, append(nodes, 39)...).Hints(onMachine(1<<40-1), Request{Count: 1})
	if err == nil || !strings.Contains(err.Error(), "its devices are on 17 NUMA nodes, at most 16") {
		t.Errorf("error %v of %d nodes", err, maxNodes+1)
	}
}

// TestHintsAreWhatALookAtEachDeviceGives compares with a count of the devices for each set of nodes.
func TestHintsAreWhatALookAtEachDeviceGives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		machine := Nodes(rapid.IntRange(1, 255).Draw(t, "machine"))
		p, list := NewPool(resource), listed()
		for i := range rapid.IntRange(1, 20).Draw(t, "devices") {
			list.Devices = append(list.Devices, model.Device{
				ID: fmt.Sprintf("%02d", i), Healthy: rapid.IntRange(0, 5).Draw(t, "healthy") > 0,
				NUMA: rapid.SliceOfNDistinct(rapid.IntRange(0, 8), 0, 3, rapid.ID).Draw(t, "nodes"),
			})
		}
		p.Set(list)
		r := Request{Count: rapid.IntRange(1, 8).Draw(t, "count")}
		for _, d := range list.Devices {
			switch rapid.IntRange(0, 9).Draw(t, "held") {
			case 0:
				r.Reusable = append(r.Reusable, d.ID)
				p.Hold("pod", "init", []string{d.ID})
			case 1:
				p.Hold("other", "main", []string{d.ID})
			}
		}
		got, err := p.Hints(onMachine(machine), r)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(slowHints(p, machine, r), got); diff != "" {
			t.Fatalf("hints (-want +got):\n%s", diff)
		}
	})
}

func slowHints(p *Pool, machine Nodes, r Request) []Hint {
	states := p.States()
	if !slices.ContainsFunc(states, func(s State) bool { return len(s.NUMA) > 0 }) {
		return nil
	}
	var all Nodes
	for _, s := range states {
		all |= NodesOf(s.NUMA...) & machine
	}
	hints, smallest := []Hint{}, all.Count()
	for nodes := Nodes(1); nodes <= all; nodes++ {
		if nodes&^all != 0 {
			continue
		}
		listed, matching, missed := 0, 0, false
		for _, s := range states {
			near, reusable := NodesOf(s.NUMA...)&nodes != 0, s.Pod == "pod" && s.Healthy
			if near {
				listed++
			}
			if near && (reusable || s.Pod == "" && s.Healthy) {
				matching++
			}
			missed = missed || reusable && !near && NodesOf(s.NUMA...)&machine != 0
		}
		if listed >= r.Count {
			smallest = min(smallest, nodes.Count())
		}
		if matching >= r.Count && !missed {
			hints = append(hints, Hint{Nodes: nodes})
		}
	}
	for i, h := range hints {
		hints[i].Preferred = h.Nodes.Count() == smallest
	}
	return hints
}

// onMachine is a Topology Manager on a machine with these NUMA nodes.
func onMachine(machine Nodes) Topology { return Topology{Policy: PolicyBestEffort, Machine: machine} }
