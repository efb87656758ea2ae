package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/wording"
)

// explanation is the result of topology explain as JSON.
type explanation struct {
	Policy    string       `json:"policy"`
	Objective string       `json:"objective"`
	Size      int          `json:"size"`
	Available []indexedGPU `json:"available"`
	Must      []indexedGPU `json:"must"`
	Chosen    chosenSet    `json:"chosen"`

	weights allocator.Weights
}

type indexedGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
}

// chosenSet is a set of GPUs with its score, and the remaining GPUs.
type chosenSet struct {
	Devices   []indexedGPU `json:"devices"`
	NUMANodes []int        `json:"numaNodes"`
	Score     int          `json:"score"`
	// Exact means that all sets were compared, so that no other set is better by the policy.
	Exact bool         `json:"exact"`
	Pairs []scoredLink `json:"pairs"`
	Left  []indexedGPU `json:"left"`
}

// scoredLink is the link of a pair of GPUs in a set, with its score.
type scoredLink struct {
	gpu.Link
	Score int `json:"score"`
}

// objectives describe the policies.
var objectives = map[allocator.Policy]string{
	allocator.Topology:  topologyObjective,
	allocator.Partition: "the best set of the best division of all available GPUs into sets of this size",
	allocator.NUMA:      "the fewest NUMA nodes, then " + topologyObjective,
	allocator.Spread:    "for whole GPUs the same as topology: " + topologyObjective,
	allocator.Pack:      "for whole GPUs the same as topology: " + topologyObjective,
}

const topologyObjective = "the highest score, then the best pairs and sets of 4 and 8 among those left " +
	"(up to 16 GPUs), then their score"

// describeSet returns the scores of the pairs in a set, and those of the available GPUs that are left.
func describeSet(s *gpu.Snapshot, w allocator.Weights, available []string, c allocator.Choice, exact bool) chosenSet {
	left := slices.DeleteFunc(slices.Clone(available), func(id string) bool { return slices.Contains(c.IDs, id) })
	set := chosenSet{
		Devices: sortedGPUs(s, c.IDs), NUMANodes: []int{}, Score: c.Score, Exact: exact,
		Pairs: []scoredLink{}, Left: sortedGPUs(s, left),
	}
	for i, d := range set.Devices {
		set.NUMANodes = append(set.NUMANodes, findGPU(s, d.UUID).NUMANode)
		for _, other := range set.Devices[i+1:] {
			l, ok := s.Link(d.Index, other.Index)
			if !ok {
				l = gpu.Link{A: d.Index, B: other.Index}
			}
			set.Pairs = append(set.Pairs, scoredLink{l, w.Score(l)})
		}
	}
	slices.Sort(set.NUMANodes)
	set.NUMANodes = slices.Compact(set.NUMANodes)
	return set
}

// sortedGPUs returns the GPUs with these UUIDs, by index.
func sortedGPUs(s *gpu.Snapshot, ids []string) []indexedGPU {
	list := []indexedGPU{}
	for _, id := range ids {
		d := findGPU(s, id)
		list = append(list, indexedGPU{d.Index, d.UUID})
	}
	slices.SortStableFunc(list, func(a, b indexedGPU) int { return cmp.Compare(a.Index, b.Index) })
	return list
}

func (e *explanation) view() cli.View {
	var nodes []string
	for _, n := range e.Chosen.NUMANodes {
		nodes = append(nodes, number(n))
	}
	return cli.View{Data: e, Table: cli.Table{
		Header: []string{"GPUS", "SCORE", "NUMA", "LEFT"},
		Rows: [][]string{{
			indexRanges(e.Chosen.Devices), strconv.Itoa(e.Chosen.Score), strings.Join(nodes, ","),
			indexRanges(e.Chosen.Left),
		}},
		Legend: fmt.Sprintf("\nPolicy %s: %s.\n%s\n%s", e.Policy, e.Objective, e.exactText(), e.sumText()),
	}}
}

func (e *explanation) exactText() string {
	if e.Chosen.Exact {
		return "All sets were compared: no other is better by this policy."
	}
	return fmt.Sprintf("The node has more than %d GPUs, so the search is greedy: another set may be better.",
		allocator.MaxExact)
}

// sumText formats a table of the pairs of the chosen set, by kind of link. Their scores add up to the score of the
// set.
func (e *explanation) sumText() string {
	if len(e.Chosen.Pairs) == 0 {
		return "A single GPU has no pairs and scores 0.\n"
	}
	pairs := map[gpu.Link][]string{} // by link; A and B of the key are 0
	var kinds []gpu.Link
	for _, p := range e.Chosen.Pairs {
		kind := p.Link
		kind.A, kind.B = 0, 0
		if pairs[kind] == nil {
			kinds = append(kinds, kind)
		}
		pairs[kind] = append(pairs[kind], fmt.Sprintf("%d-%d", p.A, p.B))
	}
	slices.SortStableFunc(kinds, func(a, b gpu.Link) int {
		return cmp.Compare(e.weights.Score(b), e.weights.Score(a))
	})
	t := cli.Table{Header: []string{"PAIRS", "LINK", "SCORE OF EACH", "TOGETHER", "WHICH"}}
	for _, kind := range kinds {
		n, which := len(pairs[kind]), wording.ShortenList(pairs[kind], 8, " ")
		t.Rows = append(t.Rows, []string{
			strconv.Itoa(n), linkText(kind), e.scoreText(kind), strconv.Itoa(n * e.weights.Score(kind)), which,
		})
	}
	var b strings.Builder
	fmt.Fprintf(&b, "The score %d is the sum over its %s:\n\n", e.Chosen.Score, wording.Count(len(e.Chosen.Pairs), "pair"))
	_ = t.Write(&b, false, false) // a strings.Builder returns no error
	return b.String()
}

// linkText describes a link, such as "NV18 by NVSwitch, SYS".
func linkText(l gpu.Link) string {
	switch {
	case l.NVLinks == 0:
		return l.PCIe.String()
	case l.Switched:
		return fmt.Sprintf("NV%d by NVSwitch, %s", l.NVLinks, l.PCIe)
	default:
		return fmt.Sprintf("NV%d, %s", l.NVLinks, l.PCIe)
	}
}

// scoreText formats how the score of a link is computed, such as "2 x 100 + 50 = 250".
func (e *explanation) scoreText(l gpu.Link) string {
	score := e.weights.Score(l)
	if l.NVLinks == 0 {
		return strconv.Itoa(score)
	}
	path := l
	path.NVLinks = 0
	onPath := e.weights.Score(path)
	return fmt.Sprintf("%d x %d + %d = %d", l.NVLinks, (score-onPath)/l.NVLinks, onPath, score)
}

// indexRanges formats a list of GPUs, such as "0-3,5".
func indexRanges(list []indexedGPU) string {
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1].Index == list[j].Index+1 {
			j++
		}
		part := strconv.Itoa(list[i].Index)
		switch {
		case j == i+1:
			part += "," + strconv.Itoa(list[j].Index)
		case j > i:
			part += "-" + strconv.Itoa(list[j].Index)
		}
		parts = append(parts, part)
		i = j + 1
	}
	return cli.OrDash(strings.Join(parts, ","))
}
