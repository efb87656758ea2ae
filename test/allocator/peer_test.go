package allocator

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/NVIDIA/go-gpuallocator/gpuallocator"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
)

// randomNode is a node whose GPUs are linked at random: on any PCIe path, with up to 18 NVLinks.
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

// question is a request with the GPUs by index.
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

func (q question) request(n *allocator.Node) allocator.Request {
	r := allocator.Request{Size: q.size}
	for _, i := range q.available {
		r.Available = append(r.Available, n.GPUs()[i].UUID)
	}
	for _, i := range q.must {
		r.Must = append(r.Must, n.GPUs()[i].UUID)
	}
	return r
}

// askPeer returns the indices that NVIDIA's policy chooses. Short of GPUs to fill its partitions it pads them with none,
// and it can choose the padded set: then the answer has fewer than were asked for.
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

func choose(t testing.TB, n *allocator.Node, p allocator.Policy, q question) (allocator.Choice, []int) {
	t.Helper()
	c, err := n.Choose(p, q.request(n))
	if err != nil {
		t.Fatalf("%+v: %v", q, err)
	}
	var chosen []int
	for i, g := range n.GPUs() {
		if slices.Contains(c.IDs, g.UUID) {
			chosen = append(chosen, i)
		}
	}
	return c, chosen
}

func newNode(t testing.TB, s *gpu.Snapshot, w allocator.Weights) *allocator.Node {
	t.Helper()
	n, err := allocator.NewNode(s, w)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// peerWeights are those of the peer.
func peerWeights() allocator.Weights {
	w := allocator.DefaultWeights()
	w.NVSwitch = 0
	return w
}

// comparison counts how the answers compare.
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
		c.Errorf("%+v of %v: %v is of a partition worth %d, the peer's %v of one worth %d", q, s.Links, ours, got, theirs, want)
	}
	worth := o.worth[bitsOf(theirs)]
	switch {
	case choice.Score != o.worth[bitsOf(ours)] || !choice.Exact:
		c.Errorf("%+v of %v: %v scores %d, said to be %+v", q, s.Links, ours, o.worth[bitsOf(ours)], choice)
	case len(theirs) < q.size:
		c.short++
	case choice.Score != worth:
		c.Errorf("%+v of %v: %v scores %d, the peer's %v %d", q, s.Links, ours, choice.Score, theirs, worth)
	case slices.Equal(ours, theirs):
		c.same++
	default:
		c.other++
	}
}

// log says how the answers compare.
func (c *comparison) log() {
	c.Helper()
	c.Logf("%d answers are the peer's, %d others score the same, and %d of the peer's have too few GPUs", c.same, c.other, c.short)
}

// TestPartitionOfRandomNodes compares the answers where GPUs are linked at random: all available and every size, then some
// available and some that must be included. Partitions of the same worth are rare there, so the answers are alike.
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

// TestPartitionOfMachines compares every request of machines on which many sets are equal: there it matters which of the
// best is taken, and ours are the peer's.
func TestPartitionOfMachines(t *testing.T) {
	for _, name := range []string{"dgx1-v100", "dgx-h100", "pcie-quad"} {
		t.Run(name, func(t *testing.T) {
			s := simulated(t, name)
			c := comparison{TB: t}
			for set := 1; set < 1<<len(s.Devices); set++ {
				available := placesOf(set)
				for size := 1; size <= len(available); size++ {
					c.compare(s, question{available: available, size: size})
				}
			}
			if c.log(); c.other > 0 {
				t.Errorf("%d sets are not the peer's", c.other)
			}
		})
	}
}

// placesOf are the bits of a set.
func placesOf(set int) (places []int) {
	for i := range bits.Len(uint(set)) {
		if set>>i&1 == 1 {
			places = append(places, i)
		}
	}
	return places
}
