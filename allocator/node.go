package allocator

import (
	"fmt"
	"math/bits"

	"gpu-cdi-plugin/gpu"
)

const (
	// maxGPUs is the maximum number of GPUs of a host. The driver has minor numbers for 248 (nv-chardev-numbers.h in
	// kernel-open).
	maxGPUs = 256
	// MaxExact is the maximum number of GPUs for which every set is compared: the table has 2^16 scores.
	MaxExact = 16
)

// GPUs are the usable GPUs of a host, with the scores of their pairs. They are immutable.
type GPUs struct {
	list  []usableGPU
	index map[string]int // index in list, by UUID
	score [][]int        // of each pair of GPUs
	numa  []set          // of each GPU: the GPUs of its NUMA node; unknown NUMA nodes count as one
	whole *Pool          // the GPUs as devices
	table *table         // for at most MaxExact GPUs, otherwise nil
}

// usableGPU is a GPU that could be read.
type usableGPU struct {
	uuid     string
	numaNode int
}

// NewGPUs returns the GPUs of a snapshot that could be read, in the snapshot's order. It leaves out GPUs that have no
// UUID, or the same UUID as an earlier GPU. It returns an error if there are too many GPUs.
func NewGPUs(s *gpu.Snapshot, w Weights) (*GPUs, error) {
	var gpus []usableGPU
	byIndex, seen := map[int]int{}, map[string]bool{"": true}
	for i := range s.Devices {
		d := &s.Devices[i]
		if !d.Usable() || seen[d.UUID] {
			continue
		}
		seen[d.UUID], byIndex[d.Index] = true, len(gpus)
		gpus = append(gpus, usableGPU{d.UUID, d.NUMANode})
	}
	if len(gpus) > maxGPUs {
		return nil, fmt.Errorf("prepare %d GPUs for allocation: at most %d are supported", len(gpus), maxGPUs)
	}
	score := newMatrix(len(gpus))
	for _, l := range s.Links {
		a, okA := byIndex[l.A]
		b, okB := byIndex[l.B]
		if okA && okB && a != b {
			score[a][b] = w.Score(l)
			score[b][a] = score[a][b]
		}
	}
	return newGPUs(gpus, score), nil
}

func newMatrix(n int) [][]int {
	rows := make([][]int, n)
	for i := range rows {
		rows[i] = make([]int, n)
	}
	return rows
}

func newGPUs(gpus []usableGPU, score [][]int) *GPUs {
	n := &GPUs{list: gpus, index: map[string]int{}, score: score, numa: make([]set, len(gpus))}
	var devices []Device
	for g, d := range gpus {
		n.index[d.uuid] = g
		devices = append(devices, Device{ID: d.uuid, UUID: d.uuid, Parent: d.uuid})
		for other, o := range gpus {
			if max(d.numaNode, gpu.NoNUMANode) == max(o.numaNode, gpu.NoNUMANode) {
				n.numa[g].add(other)
			}
		}
	}
	n.whole = NewPool(n, devices)
	if len(gpus) <= MaxExact {
		n.table = newTable(score, n.numa)
	}
	return n
}

// UUIDs returns the UUIDs of the node's GPUs, in order.
func (n *GPUs) UUIDs() []string {
	uuids := make([]string, len(n.list))
	for g := range n.list {
		uuids[g] = n.list[g].uuid
	}
	return uuids
}

// Pair returns the score of two GPUs, given by their indices in UUIDs.
func (n *GPUs) Pair(a, b int) int { return n.score[a][b] }

// Choose answers a request for whole GPUs, whose IDs are UUIDs. See Pool.Choose.
func (n *GPUs) Choose(p Policy, r Request) (Choice, error) { return n.whole.Choose(p, r) }

// scoreOf returns the score of a set.
func (n *GPUs) scoreOf(x set) int {
	if n.table != nil {
		return n.table.score[x.word()]
	}
	sum := 0
	for _, g := range x.members() {
		sum += n.scoreWith(x, g)
	}
	return sum / 2
}

// scoreWith returns the sum of a GPU's scores with each GPU of a set.
func (n *GPUs) scoreWith(x set, g int) int {
	sum, row := 0, n.score[g]
	for i, w := range x {
		for ; w != 0; w &= w - 1 {
			sum += row[i*64+bits.TrailingZeros64(w)]
		}
	}
	return sum
}
