package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
)

// explanation is what topology explain prints as JSON.
type explanation struct {
	Policy    string      `json:"policy"`
	Objective string      `json:"objective"`
	Size      int         `json:"size"`
	Available []named     `json:"available"`
	Must      []named     `json:"must"`
	Chosen    chosenSet   `json:"chosen"`
	RunnersUp []chosenSet `json:"runnersUp"`

	weights allocator.Weights
}

// named is a GPU.
type named struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
}

// chosenSet is a set of GPUs with its score, and what would be left.
type chosenSet struct {
	Devices   []named `json:"devices"`
	NUMANodes []int   `json:"numaNodes"`
	Score     int     `json:"score"`
	// Exact tells that no other set is better by the policy; if not, Bound is how much more another may score at most.
	Exact bool         `json:"exact"`
	Bound int          `json:"bound"`
	Pairs []scoredLink `json:"pairs"`
	Left  []named      `json:"left"`
	// Next is what requests of the usual sizes could get of what is left, or null where that was not compared.
	Next      *int `json:"next"`
	LeftScore int  `json:"leftScore"`
}

// scoredLink is a pair of GPUs of a set.
type scoredLink struct {
	gpu.Link
	Score int `json:"score"`
}

// objectives are the policies in words, shorter than the allocator's formulas.
var objectives = map[allocator.Policy]string{
	allocator.Topology:  topologyObjective,
	allocator.Partition: "the best set of the best division of all available GPUs into sets of this size",
	allocator.NUMA:      "the fewest NUMA nodes, then " + topologyObjective,
	allocator.Spread:    "the same as topology, on whole GPUs: " + topologyObjective,
	allocator.Pack:      "the same as topology, on whole GPUs: " + topologyObjective,
}

const topologyObjective = "the highest score, then the best pairs and sets of 4 and 8 in what is left (of up to 16 GPUs), then its score"

func newExplanation(
	s *gpu.Snapshot, n *allocator.Node, o *explainOptions, r allocator.Request, found []allocator.Choice,
) (*explanation, error) {
	e := &explanation{
		Policy: o.policy, Objective: objectives[allocator.Policy(o.policy)], Size: o.size,
		Available: namedOf(s, r.Available), Must: namedOf(s, r.Must), RunnersUp: []chosenSet{}, weights: o.weights,
	}
	for i, c := range found {
		set, err := setOf(s, n, o.weights, r.Available, c)
		if err != nil {
			return nil, fmt.Errorf("score what is left: %w", err)
		}
		if i == 0 {
			e.Chosen = set
		} else {
			e.RunnersUp = append(e.RunnersUp, set)
		}
	}
	return e, nil
}

func setOf(s *gpu.Snapshot, n *allocator.Node, w allocator.Weights, available []string, c allocator.Choice) (chosenSet, error) {
	left := slices.DeleteFunc(slices.Clone(available), func(id string) bool { return slices.Contains(c.IDs, id) })
	score, err := n.Score(left)
	next, errNext := n.Next(left)
	set := chosenSet{
		Devices: namedOf(s, c.IDs), NUMANodes: []int{}, Score: c.Score, Exact: c.Exact, Bound: c.Bound,
		Pairs: []scoredLink{}, Left: namedOf(s, left), LeftScore: score,
	}
	if next >= 0 {
		set.Next = &next
	}
	for i, d := range set.Devices {
		set.NUMANodes = append(set.NUMANodes, gpuNamed(s, d.UUID).NUMANode)
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
	return set, errors.Join(err, errNext)
}

// namedOf are GPUs by UUID, in the driver's order.
func namedOf(s *gpu.Snapshot, ids []string) []named {
	list := []named{}
	for _, id := range ids {
		d := gpuNamed(s, id)
		list = append(list, named{d.Index, d.UUID})
	}
	slices.SortStableFunc(list, func(a, b named) int { return cmp.Compare(a.Index, b.Index) })
	return list
}

func (e *explanation) view() view {
	t := table{
		header: []string{"RANK", "GPUS", "SCORE", "NUMA", "LEFT", "BEST SETS OF LEFT", "SCORE OF LEFT"},
		legend: "\n" + strings.Join([]string{e.policyText(), e.exactText(), e.sumText()}, "\n"),
	}
	for i, set := range append([]chosenSet{e.Chosen}, e.RunnersUp...) {
		rank := "chosen"
		if i > 0 {
			rank = strconv.Itoa(i + 1)
		}
		t.rows = append(t.rows, []string{
			rank, indexRanges(set.Devices), strconv.Itoa(set.Score), numaNodes(set.NUMANodes), indexRanges(set.Left),
			set.nextText(), strconv.Itoa(set.LeftScore),
		})
	}
	return view{data: e, table: t}
}

func (s *chosenSet) nextText() string {
	if s.Next == nil {
		return orDash("")
	}
	return strconv.Itoa(*s.Next)
}

func numaNodes(nodes []int) string {
	var list []string
	for _, n := range nodes {
		list = append(list, number(n))
	}
	return strings.Join(list, ",")
}

func (e *explanation) policyText() string {
	return fmt.Sprintf("Policy %s: %s.", e.Policy, e.Objective)
}

func (e *explanation) exactText() string {
	switch {
	case e.Chosen.Exact:
		return "The answer is exact: no other set is better by this policy."
	case e.Chosen.Bound == 0:
		return "No other set scores more, but the rest of the policy was not compared for all sets."
	default:
		return fmt.Sprintf("The answer is not exact: another set may score up to %d more.", e.Chosen.Bound)
	}
}

// sumText says what the score of the chosen set is made of: its pairs, those of a kind together.
func (e *explanation) sumText() string {
	kinds := map[gpu.Link][]string{}
	for _, p := range e.Chosen.Pairs {
		kind := p.Link
		kind.A, kind.B = 0, 0
		kinds[kind] = append(kinds[kind], fmt.Sprintf("%d-%d", p.A, p.B))
	}
	if len(kinds) == 0 {
		return "A single GPU has no pairs, and the score 0.\n"
	}
	order := make([]gpu.Link, 0, len(kinds))
	for kind := range kinds {
		order = append(order, kind)
	}
	slices.SortStableFunc(order, func(a, b gpu.Link) int {
		return cmp.Or(
			cmp.Compare(e.weights.Score(b), e.weights.Score(a)), cmp.Compare(b.PCIe, a.PCIe), cmp.Compare(b.NVLinks, a.NVLinks),
			strings.Compare(kinds[a][0], kinds[b][0]),
		)
	})
	t := table{header: []string{"PAIRS", "LINK", "SCORE OF EACH", "TOGETHER", "WHICH"}}
	for _, kind := range order {
		t.rows = append(t.rows, []string{
			strconv.Itoa(len(kinds[kind])), linkWords(kind), e.eachText(kind), strconv.Itoa(len(kinds[kind]) * e.weights.Score(kind)),
			someOf(kinds[kind], 8),
		})
	}
	var b strings.Builder
	fmt.Fprintf(&b, "The score %d is the sum over its %s:\n\n", e.Chosen.Score, plural(len(e.Chosen.Pairs), "pair"))
	_ = t.write(&b, false, false) // a strings.Builder takes everything
	return b.String()
}

// linkWords is "NV2 PIX".
func linkWords(l gpu.Link) string {
	words := l.PCIe.String()
	if l.PCIe == gpu.PathUnknown {
		words = "?"
	}
	switch {
	case l.NVLinks == 0:
		return words
	case l.Switched:
		return fmt.Sprintf("NV%d by NVSwitch, %s", l.NVLinks, words)
	default:
		return fmt.Sprintf("NV%d, %s", l.NVLinks, words)
	}
}

// eachText is how a link's score comes about, such as "2 x 100 + 50 = 250".
func (e *explanation) eachText(l gpu.Link) string {
	score := e.weights.Score(l)
	if l.NVLinks == 0 {
		return strconv.Itoa(score)
	}
	path := l
	path.NVLinks = 0
	onPath := e.weights.Score(path)
	return fmt.Sprintf("%d x %d + %d = %d", l.NVLinks, (score-onPath)/l.NVLinks, onPath, score)
}

// someOf names the first few of a list.
func someOf(list []string, most int) string {
	if len(list) <= most+1 {
		return strings.Join(list, " ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:most], " "), len(list)-most)
}

// indexRanges writes GPUs as "0-3,5".
func indexRanges(list []named) string {
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1].Index == list[j].Index+1 {
			j++
		}
		part := strconv.Itoa(list[i].Index)
		if j > i {
			part += map[bool]string{true: ",", false: "-"}[j == i+1] + strconv.Itoa(list[j].Index)
		}
		parts = append(parts, part)
		i = j + 1
	}
	return orDash(strings.Join(parts, ","))
}
