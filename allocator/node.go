package allocator

import (
	"fmt"
	"hash/maphash"
	"slices"

	"gpu-cdi-plugin/gpu"
)

const (
	// MaxGPUs is the most GPUs that a Node can have. The driver has minor numbers for 248 (kernel-open's nv-chardev-numbers.h).
	MaxGPUs = 256
	// MaxScore is the most that a pair of GPUs can score.
	MaxScore = 10_000_000
	// tableGPUs is the most GPUs for which the score of every set is kept: 2^16 numbers of 4 bytes.
	tableGPUs = 16
)

// GPU is a GPU of a Node.
type GPU struct {
	// UUID is the GPU's name in requests.
	UUID string
	// Index is the driver's.
	Index int
	// NUMANode is the NUMA node it is attached to, or gpu.NoNUMANode.
	NUMANode int
}

// Node has the usable GPUs of a node and how well each two are connected, prepared for requests. It does not change.
type Node struct {
	gpus   []GPU
	byUUID map[string]int
	score  [][]int32
	numa   []set // the GPUs of each NUMA node
	// table and next are of every set of GPUs, by its bits, if there are at most tableGPUs; otherwise they are nil: its
	// score, and what requests of the usual sizes could get of it.
	table, next []int32
	// tree is there where no table is.
	tree  tree
	kind  []int // of each GPU, see fillKinds
	whole *Pool
	cache cache
}

// NewNode prepares the GPUs of a snapshot that could be read and that have a UUID, in the snapshot's order. The error
// is about the weights, or more than MaxGPUs.
func NewNode(s *gpu.Snapshot, w Weights) (*Node, error) { return (*Node)(nil).Renew(s, w) }

// Renew is NewNode for a later snapshot: the node itself if nothing has changed. The node may be nil.
func (n *Node) Renew(s *gpu.Snapshot, w Weights) (*Node, error) {
	if err := w.Validate(); err != nil {
		return nil, fmt.Errorf("weigh the links of the GPUs: %w", err)
	}
	var gpus []GPU
	place := map[int]int{} // by index
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Usable() && d.UUID != "" {
			place[d.Index] = len(gpus)
			gpus = append(gpus, GPU{UUID: d.UUID, Index: d.Index, NUMANode: d.NUMANode})
		}
	}
	score := square[int](len(gpus))
	for _, l := range s.Links {
		a, okA := place[l.A]
		b, okB := place[l.B]
		if okA && okB {
			score[a][b] = w.Score(l)
			score[b][a] = score[a][b]
		}
	}
	if n.same(gpus, score) {
		return n, nil
	}
	return NewNodeFromMatrix(gpus, score)
}

func square[T any](n int) [][]T {
	rows := make([][]T, n)
	for i := range rows {
		rows[i] = make([]T, n)
	}
	return rows
}

func (n *Node) same(gpus []GPU, score [][]int) bool {
	return n != nil && slices.Equal(n.gpus, gpus) && slices.EqualFunc(n.score, score, func(a []int32, b []int) bool {
		return slices.EqualFunc(a, b, func(x int32, y int) bool { return int(x) == y })
	})
}

// NewNodeFromMatrix prepares GPUs whose pairwise scores are known: score[a][b] is that of gpus[a] and gpus[b], from 0 to
// MaxScore. The error says what is wrong with the matrix or the GPUs.
func NewNodeFromMatrix(gpus []GPU, score [][]int) (*Node, error) {
	if err := checkMatrix(gpus, score); err != nil {
		return nil, fmt.Errorf("prepare %d GPUs for allocation: %w", len(gpus), err)
	}
	rows := square[int32](len(gpus))
	for a := range gpus {
		for b := range gpus {
			rows[a][b] = int32(score[a][b])
		}
	}
	n := newNode(slices.Clone(gpus), rows)
	n.whole = n.wholePool()
	return n, nil
}

func newNode(gpus []GPU, score [][]int32) *Node {
	n := &Node{gpus: gpus, byUUID: make(map[string]int, len(gpus)), score: score, cache: cache{seed: maphash.MakeSeed()}}
	for g := range gpus {
		n.byUUID[gpus[g].UUID] = g
	}
	n.fillNUMA()
	if len(gpus) > tableGPUs {
		n.fillTree()
		n.fillKinds()
		return n
	}
	n.fillTable()
	n.fillNext()
	return n
}

// part is a node with some of the GPUs alone.
func (n *Node) part(places []int) *Node {
	gpus, score := make([]GPU, len(places)), square[int32](len(places))
	for i, a := range places {
		gpus[i] = n.gpus[a]
		for j, b := range places {
			score[i][j] = n.score[a][b]
		}
	}
	return newNode(gpus, score)
}

func checkMatrix(gpus []GPU, score [][]int) error {
	if len(gpus) > MaxGPUs {
		return fmt.Errorf("there can be %d at most", MaxGPUs)
	}
	if len(score) != len(gpus) {
		return fmt.Errorf("the matrix has %d rows", len(score))
	}
	seen := map[string]bool{}
	for a := range gpus {
		if gpus[a].UUID == "" || seen[gpus[a].UUID] {
			return fmt.Errorf("GPU %d: the UUID %q is empty or there twice", gpus[a].Index, gpus[a].UUID)
		}
		seen[gpus[a].UUID] = true
		if len(score[a]) != len(gpus) {
			return fmt.Errorf("row %d of the matrix has %d numbers", a, len(score[a]))
		}
	}
	for a := range gpus {
		for b, s := range score[a] {
			switch {
			case a == b && s != 0:
				return fmt.Errorf("GPU %d has the score %d with itself", a, s)
			case s < 0 || s > MaxScore:
				return fmt.Errorf("GPUs %d and %d: the score %d is not from 0 to %d", a, b, s, MaxScore)
			case s != score[b][a]:
				return fmt.Errorf("GPUs %d and %d: the scores %d and %d differ", a, b, s, score[b][a])
			}
		}
	}
	return nil
}

// GPUs are the node's GPUs in order. The slice must not be changed.
func (n *Node) GPUs() []GPU { return n.gpus }

// Pair is the score of the GPUs at two places of GPUs.
func (n *Node) Pair(a, b int) int { return int(n.score[a][b]) }

// Score is the score of a set of GPUs, by UUID. The error is a *RequestError that names those which are unknown or
// there twice.
func (n *Node) Score(uuids []string) (int, error) {
	x, err := n.setOf(uuids)
	if err != nil {
		return 0, err
	}
	return n.scoreOf(x), nil
}

// Next is what requests of the usual sizes could get of a set of GPUs, by UUID: L of Topology. On nodes of more than 16
// GPUs nothing is compared by it, and it is -1. The error is that of Score.
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

// Choose answers a request for whole GPUs, whose IDs are UUIDs. See Pool.Choose.
func (n *Node) Choose(p Policy, r Request) (Choice, error) { return n.whole.Choose(p, r) }

// Rank is Choose with the runners-up. See Pool.Rank.
func (n *Node) Rank(p Policy, r Request, k int) ([]Choice, error) { return n.whole.Rank(p, r, k) }
