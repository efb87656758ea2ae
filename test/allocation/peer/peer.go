// Package peer compares the allocator with the policy of NVIDIA's device plugin on the same machines: the results, and
// the time that they take.
package peer

import (
	"math/bits"

	"github.com/NVIDIA/go-gpuallocator/gpuallocator"

	"gpu-cdi-plugin/gpu"
)

// peerDevices returns the GPUs of a snapshot as NVIDIA's allocator gets them from the driver. There, a pair with
// NVLinks has two links, one for PCIe and one for all NVLinks, and their scores are added. NVLinks through NVSwitches
// are missing, because NVIDIA's allocator looks for a GPU at the other end of a link.
func peerDevices(s *gpu.Snapshot) gpuallocator.DeviceList {
	var devices gpuallocator.DeviceList
	for i := range s.Devices {
		d := &gpuallocator.Device{Index: i, Links: map[int][]gpuallocator.P2PLink{}}
		d.UUID = s.Devices[i].UUID
		devices = append(devices, d)
	}
	for _, l := range s.Links {
		peerLink(devices[l.A], devices[l.B], l)
		peerLink(devices[l.B], devices[l.A], l)
	}
	return devices
}

func peerLink(from, to *gpuallocator.Device, l gpu.Link) {
	// PCIe links have the numbers of gpu.PCIePath. After these come the numbers for one NVLink, two and so on.
	const noNVLink = 6
	if l.PCIe != gpu.PathUnknown {
		from.Links[to.Index] = append(from.Links[to.Index], linkOf(to, int(l.PCIe)))
	}
	if l.NVLinks > 0 && !l.Switched {
		from.Links[to.Index] = append(from.Links[to.Index], linkOf(to, noNVLink+l.NVLinks))
	}
}

func linkOf(to *gpuallocator.Device, kind int) gpuallocator.P2PLink {
	l := gpuallocator.P2PLink{GPU: to}
	setKind(&l.Type, kind)
	return l
}

// setKind sets a value whose type is internal to the other module and cannot be named here.
func setKind[T ~uint](t *T, kind int) { *t = T(kind) }

// oracle computes the objective of NVIDIA's policy by trying every set. Sets have a bit for each GPU.
type oracle struct {
	size  int
	score []int       // of each set
	split map[int]int // the highest sum of a set's partitions into sets of size, for sets that can be divided that way
}

func newOracle(gpus, size int, pair func(a, b int) int) *oracle {
	o := &oracle{size: size, score: make([]int, 1<<gpus), split: map[int]int{0: 0}}
	for set := 1; set < len(o.score); set++ {
		first, rest := bits.TrailingZeros(uint(set)), set&(set-1)
		o.score[set] = o.score[rest]
		for r := rest; r != 0; r &= r - 1 {
			o.score[set] += pair(first, bits.TrailingZeros(uint(r)))
		}
	}
	return o
}

// total returns the highest sum of all partitions of the available GPUs that contain chosen as a set. The other sets
// have the same size, except one with the rest.
func (o *oracle) total(available, chosen int) int {
	others := available &^ chosen
	left := bits.OnesCount(uint(others)) % o.size
	if left == 0 {
		return o.score[chosen] + o.whole(others)
	}
	best := 0
	for set := range subsets(others, left) {
		best = max(best, o.score[set]+o.whole(others&^set))
	}
	return o.score[chosen] + best
}

// whole returns the highest sum of a set's partitions into sets of size, for a set that can be divided that way.
func (o *oracle) whole(set int) int {
	if sum, ok := o.split[set]; ok {
		return sum
	}
	best := 0
	first := set & -set
	for others := range subsets(set&^first, o.size-1) {
		best = max(best, o.score[first|others]+o.whole(set&^first&^others))
	}
	o.split[set] = best
	return best
}

// subsets yields the subsets with size GPUs.
func subsets(set, size int) func(func(int) bool) {
	return func(yield func(int) bool) {
		for sub := set; ; sub = (sub - 1) & set {
			if bits.OnesCount(uint(sub)) == size && !yield(sub) {
				return
			}
			if sub == 0 {
				return
			}
		}
	}
}
