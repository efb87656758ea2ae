package allocator

import (
	"fmt"
	"math/bits"
	"slices"

	"gpu-cdi-plugin/gpu"
)

const (
	// maxGPUs is the most GPUs of a Node. The driver has minor numbers for 248 (kernel-open's nv-chardev-numbers.h).
	maxGPUs = 256
	// maxScore is the highest score of a pair. The sums over the pairs of tableGPUs GPUs then fit into 32 bits.
	maxScore = 10_000_000
	// tableGPUs is the most GPUs for which a Node has the score of every set: 2^16 numbers of 4 bytes.
	tableGPUs = 16
)

// Node has the usable GPUs of a node and the scores of their pairs. It is immutable.
type Node struct {
	gpus  []nodeGPU
	index map[string]int // of gpus, by UUID
	score [][]int32      // of each pair
	numa  []set          // the GPUs of each NUMA node
	whole *Pool          // the GPUs as devices

	// With at most tableGPUs GPUs; otherwise nil:
	table []int32  // the score of every set, by its bits
	next  []int32  // what the next requests could get of every set: L in Topology
	kinds []uint32 // sets of GPUs that can be exchanged without a change of any score

	tree tree // with more GPUs
}

// nodeGPU is a GPU of a Node.
type nodeGPU struct {
	uuid     string
	numaNode int
}

// NewNode prepares the GPUs of a snapshot that could be read and have a UUID, in the snapshot's order. The error is an
// invalid weight, too many GPUs, a UUID that two GPUs have, or an impossible number of NVLinks.
func NewNode(s *gpu.Snapshot, w Weights) (*Node, error) { return (*Node)(nil).Renew(s, w) }

// Renew is NewNode for a later snapshot. It returns the node itself if nothing has changed. The node may be nil.
func (n *Node) Renew(s *gpu.Snapshot, w Weights) (*Node, error) {
	if err := w.Validate(); err != nil {
		return nil, fmt.Errorf("weigh the links of the GPUs: %w", err)
	}
	var gpus []nodeGPU
	byIndex, byUUID := map[int]int{}, map[string]bool{}
	for i := range s.Devices {
		d := &s.Devices[i]
		if !d.Usable() || d.UUID == "" {
			continue
		}
		if byUUID[d.UUID] {
			return nil, fmt.Errorf("prepare the GPUs for allocation: two have the UUID %s", d.UUID)
		}
		byUUID[d.UUID], byIndex[d.Index] = true, len(gpus)
		gpus = append(gpus, nodeGPU{d.UUID, d.NUMANode})
	}
	if len(gpus) > maxGPUs {
		return nil, fmt.Errorf("prepare %d GPUs for allocation: at most %d are supported", len(gpus), maxGPUs)
	}
	score := newMatrix(len(gpus))
	for _, l := range s.Links {
		a, okA := byIndex[l.A]
		b, okB := byIndex[l.B]
		if !okA || !okB || a == b {
			continue
		}
		sum := w.Score(l)
		if sum < 0 || sum > maxScore {
			return nil, fmt.Errorf("prepare the GPUs for allocation: %d and %d have %d NVLinks", l.A, l.B, l.NVLinks)
		}
		score[a][b], score[b][a] = int32(sum), int32(sum)
	}
	if n != nil && slices.Equal(n.gpus, gpus) && slices.EqualFunc(n.score, score, slices.Equal) {
		return n, nil
	}
	return newNode(gpus, score), nil
}

func newMatrix(n int) [][]int32 {
	rows := make([][]int32, n)
	for i := range rows {
		rows[i] = make([]int32, n)
	}
	return rows
}

func newNode(gpus []nodeGPU, score [][]int32) *Node {
	n := &Node{gpus: gpus, index: map[string]int{}, score: score}
	var devices []Device
	numa := map[int]*set{} // GPUs of unknown NUMA nodes count as being on one
	var order []int
	for g, d := range gpus {
		n.index[d.uuid] = g
		devices = append(devices, Device{ID: d.uuid, UUID: d.uuid, Parent: d.uuid})
		node := max(d.numaNode, gpu.NoNUMANode)
		if numa[node] == nil {
			numa[node] = &set{}
			order = append(order, node)
		}
		numa[node].add(g)
	}
	for _, node := range order {
		n.numa = append(n.numa, *numa[node])
	}
	n.whole = NewPool(n, devices)
	if len(gpus) > tableGPUs {
		n.tree = newTree(score)
		return n
	}
	n.fillTable()
	n.fillNext()
	n.fillKinds()
	return n
}

// UUIDs returns the UUIDs of the node's GPUs, in order.
func (n *Node) UUIDs() []string {
	uuids := make([]string, len(n.gpus))
	for g := range n.gpus {
		uuids[g] = n.gpus[g].uuid
	}
	return uuids
}

// Pair returns the score of two GPUs, by their positions in UUIDs.
func (n *Node) Pair(a, b int) int { return int(n.score[a][b]) }

// Score returns the score of a set of GPUs, by UUID. The error is a *RequestError about UUIDs that are unknown or
// listed twice.
func (n *Node) Score(uuids []string) (int, error) {
	x, err := n.setOf(uuids)
	if err != nil {
		return 0, err
	}
	return n.scoreOf(x), nil
}

// Next returns what the next requests could get of a set of GPUs, by UUID: L in Topology. It is -1 on nodes of more
// than 16 GPUs. The error is that of Score.
func (n *Node) Next(uuids []string) (int, error) {
	x, err := n.setOf(uuids)
	switch {
	case err != nil:
		return 0, err
	case n.table == nil:
		return -1, nil
	default:
		return int(n.next[x.word()]), nil
	}
}

func (n *Node) setOf(uuids []string) (set, error) {
	q, err := n.whole.resolve(Request{Available: uuids, Size: len(uuids)})
	if err != nil {
		return set{}, err
	}
	return n.whole.query(q).available, nil
}

// scoreOf returns the score of a set.
func (n *Node) scoreOf(x set) int {
	sum := 0
	for _, g := range x.members() {
		sum += n.scoreWith(x, g)
	}
	return sum / 2
}

// scoreWith returns the sum of the scores of a GPU with each GPU of a set.
func (n *Node) scoreWith(x set, g int) int {
	sum, row := 0, n.score[g]
	for i, w := range x {
		for ; w != 0; w &= w - 1 {
			sum += int(row[i*64+bits.TrailingZeros64(w)])
		}
	}
	return sum
}

// Choose answers a request for whole GPUs, whose IDs are UUIDs. See Pool.Choose.
func (n *Node) Choose(p Policy, r Request) (Choice, error) { return n.whole.Choose(p, r) }

// Rank answers a request for whole GPUs with the best k sets. See Pool.Rank.
func (n *Node) Rank(p Policy, r Request, k int) ([]Choice, error) { return n.whole.Rank(p, r, k) }

// query is a request by the GPUs of a node: size GPUs of from, with all of must. What is available but not in from
// cannot be chosen, and counts as left for the next requests. must ⊆ from ⊆ available.
type query struct {
	available, from, must set
	size                  int
}

// found is a set of GPUs that answers a query.
type found struct {
	set   set
	nodes int // the number of NUMA nodes, if it counts
	score int
	exact bool
	bound int // see Choice
}

// rank returns the best k sets of GPUs, best first, or all if there are fewer. There is at least one: the request is
// valid.
func (n *Node) rank(p Policy, q query, k int) []found {
	switch {
	case n.table == nil:
		return rankLarge(q, k, func(q query) found { return n.searchLarge(p, q) })
	case p == Partition:
		return n.searchPartitions(q, k)
	case p == NUMA:
		return n.searchTable(q, n.numa, k)
	default:
		return n.searchTable(q, nil, k)
	}
}
