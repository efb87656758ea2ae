package peer

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/NVIDIA/go-gpuallocator/gpuallocator"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

// randomNode returns a node with random PCIe paths and up to 18 NVLinks for each pair.
func randomNode(random *rand.Rand, gpus int) *gpu.Snapshot {
	s := &gpu.Snapshot{}
	for i := range gpus {
		s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: uuid(i)})
		for j := i + 1; j < gpus; j++ {
			path := gpu.PCIePath(random.IntN(int(gpu.PathSameBoard) + 1))
			s.Links = append(s.Links, gpu.Link{A: i, B: j, PCIe: path, NVLinks: max(0, random.IntN(24)-5)})
		}
	}
	return s
}

func uuid(i int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i) }

// question is a request with GPUs by index.
type question struct {
	available, must []int
	size            int
}

func randomQuestion(random *rand.Rand, gpus int) question {
	q := question{available: random.Perm(gpus)[:1+random.IntN(gpus)]}
	q.size = 1 + random.IntN(len(q.available))
	q.must = slices.Clone(q.available[:random.IntN(q.size+1)*random.IntN(2)])
	slices.Sort(q.available)
	return q
}

func (q question) request(n *allocator.GPUs) allocator.Request {
	r, uuids := allocator.Request{Size: q.size}, n.UUIDs()
	for _, i := range q.available {
		r.Available = append(r.Available, uuids[i])
	}
	for _, i := range q.must {
		r.Must = append(r.Must, uuids[i])
	}
	return r
}

// askPeer returns the indices that NVIDIA's policy chooses. It pads partitions that lack GPUs and can choose the padded
// set: then the answer has fewer GPUs than requested.
func askPeer(devices gpuallocator.DeviceList, q question) []int {
	pick := func(indices []int) (some []*gpuallocator.Device) {
		for _, i := range indices {
			some = append(some, devices[i])
		}
		return some
	}
	var chosen []int
	for _, d := range gpuallocator.NewBestEffortPolicy().Allocate(pick(q.available), pick(q.must), q.size) {
		if d != nil {
			chosen = append(chosen, d.Index)
		}
	}
	return chosen
}

func bitsOf(indices []int) (set int) {
	for _, i := range indices {
		set |= 1 << i
	}
	return set
}

func choose(t testing.TB, n *allocator.GPUs, p allocator.Policy, q question) (allocator.Choice, []int) {
	t.Helper()
	c, err := n.Choose(p, q.request(n))
	if err != nil {
		t.Fatalf("%+v: %v", q, err)
	}
	var chosen []int
	for i, uuid := range n.UUIDs() {
		if slices.Contains(c.IDs, uuid) {
			chosen = append(chosen, i)
		}
	}
	return c, chosen
}

func newNode(t testing.TB, s *gpu.Snapshot, w allocator.Weights) *allocator.GPUs {
	t.Helper()
	n, err := allocator.NewGPUs(s, w)
	testenv.Must(t, err)
	return n
}

// peerWeights returns weights like the peer's.
func peerWeights() allocator.Weights {
	w := allocator.DefaultWeights()
	w.NVSwitch = 0
	return w
}

// comparison compares answers with the peer's and counts the results.
type comparison struct {
	testing.TB
	same, other, short int
}

func (c *comparison) compare(s *gpu.Snapshot, q question) {
	c.Helper()
	n := newNode(c, s, peerWeights())
	choice, ours := choose(c, n, allocator.Partition, q)
	theirs := askPeer(peerDevices(s), q)
	o := newOracle(len(s.Devices), q.size, n.Pair)
	available := bitsOf(q.available)
	if got, want := o.total(available, bitsOf(ours)), o.total(available, bitsOf(theirs)); got != want {
		c.Errorf("%+v of %v: the partition of %v scores %d, that of the peer's %v %d",
			q, s.Links, ours, got, theirs, want)
	}
	theirScore := o.score[bitsOf(theirs)]
	switch {
	case choice.Score != o.score[bitsOf(ours)]:
		c.Errorf("%+v of %v: %v scores %d, the allocator reports %+v", q, s.Links, ours, o.score[bitsOf(ours)], choice)
	case len(theirs) < q.size:
		c.short++
	case choice.Score != theirScore:
		c.Errorf("%+v of %v: %v scores %d, the peer's %v %d", q, s.Links, ours, choice.Score, theirs, theirScore)
	case slices.Equal(ours, theirs):
		c.same++
	default:
		c.other++
	}
}

func (c *comparison) log() {
	c.Helper()
	c.Logf("%d answers are the same, %d score the same; %d of the peer's have too few GPUs", c.same, c.other, c.short)
}

// TestPartitionOfRandomNodes compares the answers on nodes with random links, where partitions of the same score are
// rare: first all GPUs and every size, then random requests.
func TestPartitionOfRandomNodes(t *testing.T) {
	for gpus, cases := range map[int]int{8: 10_000, 12: 1000} {
		t.Run(fmt.Sprintf("%d GPUs", gpus), func(t *testing.T) {
			random := rand.New(rand.NewPCG(uint64(gpus), 5))
			c := comparison{TB: t}
			for size := 1; size <= gpus; size++ {
				c.compare(randomNode(random, gpus), question{available: random.Perm(gpus), size: size})
			}
			for range cases {
				c.compare(randomNode(random, gpus), randomQuestion(random, gpus))
			}
			c.log()
		})
	}
}

// TestPartitionOfMachines compares every request on machines where many sets have the same score: ours is the same one
// of the best sets as the peer's.
func TestPartitionOfMachines(t *testing.T) {
	for _, name := range []string{"dgx1-v100", "dgx-h100", "pcie-quad"} {
		t.Run(name, func(t *testing.T) {
			s := simulated(t, name)
			c := comparison{TB: t}
			for set := 1; set < 1<<len(s.Devices); set++ {
				available := indicesOf(set)
				for size := 1; size <= len(available); size++ {
					c.compare(s, question{available: available, size: size})
				}
			}
			if c.log(); c.other > 0 {
				t.Errorf("%d sets differ from the peer's", c.other)
			}
		})
	}
}

// indicesOf returns the bits of a set.
func indicesOf(set int) (indices []int) {
	for i := range bits.Len(uint(set)) {
		if set>>i&1 == 1 {
			indices = append(indices, i)
		}
	}
	return indices
}
