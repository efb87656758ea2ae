package allocator

import (
	"fmt"
	"math/bits"

	"gpu-cdi-plugin/gpu"
)

const (
	// MaxGPUs is the most GPUs that a Node can have.
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
	// table has the score of every set of GPUs, by its bits, if there are at most tableGPUs; otherwise it is nil.
	table []int32
	whole *Pool
}

// NewNode prepares the GPUs of a snapshot that could be read and that have a UUID, in the snapshot's order. The error
// is about the weights, or more than MaxGPUs.
func NewNode(s *gpu.Snapshot, w Weights) (*Node, error) {
	if err := w.Validate(); err != nil {
		return nil, fmt.Errorf("weigh the links of the GPUs: %w", err)
	}
	var gpus []GPU
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Usable() && d.UUID != "" {
			gpus = append(gpus, GPU{UUID: d.UUID, Index: d.Index, NUMANode: d.NUMANode})
		}
	}
	score := make([][]int, len(gpus))
	for a := range gpus {
		score[a] = make([]int, len(gpus))
		for b := range gpus {
			if l, ok := s.Link(gpus[a].Index, gpus[b].Index); ok && a != b {
				score[a][b] = w.Score(l)
			}
		}
	}
	return NewNodeFromMatrix(gpus, score)
}

// NewNodeFromMatrix prepares GPUs whose pairwise scores are known: score[a][b] is that of gpus[a] and gpus[b], from 0 to
// MaxScore. The error says what is wrong with the matrix or the GPUs.
func NewNodeFromMatrix(gpus []GPU, score [][]int) (*Node, error) {
	if err := checkMatrix(gpus, score); err != nil {
		return nil, fmt.Errorf("prepare %d GPUs for allocation: %w", len(gpus), err)
	}
	n := &Node{gpus: gpus, byUUID: make(map[string]int, len(gpus)), score: make([][]int32, len(gpus))}
	for a := range gpus {
		n.byUUID[gpus[a].UUID] = a
		n.score[a] = make([]int32, len(gpus))
		for b := range gpus {
			n.score[a][b] = int32(score[a][b])
		}
	}
	n.fillTable()
	n.whole = n.wholePool()
	return n, nil
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

// fillTable adds the lowest GPU of each set to the set without it.
func (n *Node) fillTable() {
	if len(n.gpus) > tableGPUs {
		return
	}
	n.table = make([]int32, 1<<len(n.gpus))
	for x := 1; x < len(n.table); x++ {
		lowest, rest := bits.TrailingZeros(uint(x)), x&(x-1)
		sum := n.table[rest]
		for r := rest; r != 0; r &= r - 1 {
			sum += n.score[lowest][bits.TrailingZeros(uint(r))]
		}
		n.table[x] = sum
	}
}

// GPUs are the node's GPUs in order. The slice must not be changed.
func (n *Node) GPUs() []GPU { return n.gpus }

// Pair is the score of the GPUs at two places of GPUs.
func (n *Node) Pair(a, b int) int { return int(n.score[a][b]) }

// Score is the score of a set of GPUs, by UUID. The error is a *RequestError that names those which are unknown or
// there twice.
func (n *Node) Score(uuids []string) (int, error) {
	places, err := n.whole.places(uuids)
	if err != nil {
		return 0, err
	}
	sum := 0
	for i, a := range places {
		for _, b := range places[:i] {
			sum += int(n.score[a][b])
		}
	}
	return sum, nil
}

// Choose answers a request for whole GPUs, whose IDs are UUIDs. See Pool.Choose.
func (n *Node) Choose(p Policy, r Request) (Choice, error) { return n.whole.Choose(p, r) }

// Rank is Choose with the runners-up. See Pool.Rank.
func (n *Node) Rank(p Policy, r Request, k int) ([]Choice, error) { return n.whole.Rank(p, r, k) }
