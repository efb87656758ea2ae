package main

import (
	"slices"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
)

// prefers asks which of the GPUs are preferred, by their indices. It is nil while the plugin is between two lives.
func (s *served) prefers(e *kubelettest.Endpoint, size int, available ...int) []int {
	s.t.Helper()
	r := &v1beta1.ContainerPreferredAllocationRequest{AllocationSize: int32(size)}
	for _, g := range available {
		r.AvailableDeviceIDs = append(r.AvailableDeviceIDs, s.node.Machine().GPUs[g].UUID)
	}
	answer, err := e.Client.GetPreferredAllocation(s.t.Context(), &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{r},
	})
	if err != nil {
		return nil
	}
	var chosen []int
	for g, gpu := range s.node.Machine().GPUs {
		if slices.Contains(answer.GetContainerResponses()[0].GetDeviceIDs(), gpu.UUID) {
			chosen = append(chosen, g)
		}
	}
	return chosen
}

// GPUs 2 and 3 of the machine are under one switch; 0 and 1 are on other host bridges of the other NUMA node.
func TestServePrefersWellConnectedGPUs(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.start()
	preferred := func(healthy, lost int, want ...int) {
		t.Helper()
		waitFor(t, "the preference", func() bool {
			return slices.Equal(s.prefers(s.listed(gpuResource, healthy, lost), 2, 0, 1, 2, 3), want)
		})
	}
	preferred(4, 0, 2, 3)

	// A GPU that is lost leaves the candidates; the others are served.
	mustDo(t, s.node.Lose(2))
	s.signal(syscall.SIGHUP)
	preferred(3, 1, 0, 1)
	mustDo(t, s.node.ClearGPU(2))
	s.signal(syscall.SIGHUP)
	preferred(4, 0, 2, 3)

	// Other weights hold from the reload on.
	s.configure("allocation: {weights: {node: 100}}")
	s.signal(syscall.SIGHUP)
	preferred(4, 0, 0, 1)
}

// Where the driver does not say how the GPUs are linked, their places on PCIe and their NUMA nodes count.
func TestServePrefersGPUsWhoseLinksCannotBeRead(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	mustDo(t, s.node.Hang("nvmlDeviceGetTopologyCommonAncestor", sim.AnyGPU))
	s.start()
	e := s.listed(gpuResource, 4, 0)
	for _, c := range []struct{ available, want []int }{
		{[]int{0, 1, 2, 3}, []int{2, 3}}, {[]int{0, 1, 2}, []int{0, 1}}, {[]int{1, 2, 3}, []int{2, 3}},
	} {
		if chosen := s.prefers(e, 2, c.available...); !slices.Equal(chosen, c.want) {
			t.Errorf("of %v GPUs %v are preferred, want %v", c.available, chosen, c.want)
		}
	}
}

// The first answers are as right as all others: the kubelet asks as soon as the resource is registered.
func TestServesFirstPreferencesAreRight(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx1-v100", "")
	s.start()
	s.prefersTheBest(s.listed(gpuResource, 8, 0), []int{0, 4, 5}, []int{0, 1, 2, 3, 4, 5, 6, 7})
}

// prefersTheBest asks which of some GPUs are preferred, and of all sets of others, and expects the best connected.
func (s *served) prefersTheBest(e *kubelettest.Endpoint, first, others []int) {
	s.t.Helper()
	known, err := s.node.Snapshot()
	mustDo(s.t, err)
	node, err := allocator.NewGPUs(known, allocator.DefaultWeights())
	mustDo(s.t, err)
	uuids := func(gpus []int) (list []string) {
		for _, g := range gpus {
			list = append(list, s.node.Machine().GPUs[g].UUID)
		}
		return list
	}
	check := func(size int, available []int) {
		s.t.Helper()
		best, err := node.Choose(allocator.Topology, allocator.Request{Available: uuids(available), Size: size})
		mustDo(s.t, err)
		got := s.prefers(e, size, available...)
		all, err := node.Choose(allocator.Topology, allocator.Request{Available: uuids(got), Size: len(got)})
		mustDo(s.t, err)
		if len(got) != size || all.Score != best.Score {
			s.t.Errorf("%d of %v: %v, with the score %d, want one with %d", size, available, got, all.Score, best.Score)
		}
	}
	check(2, first)
	for set := range 1 << len(others) {
		var available []int
		for i, g := range others {
			if set&(1<<i) != 0 {
				available = append(available, g)
			}
		}
		for size := 1; size <= len(available); size++ {
			check(size, available)
		}
	}
}
