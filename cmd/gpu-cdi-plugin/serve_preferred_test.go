package main

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/plugin/plugintest"
	"gpu-cdi-plugin/sim"
)

// prefers asks which of the GPUs are preferred, by their indices. It is nil while the plugin is between two lives.
func (s *served) prefers(e *plugintest.Endpoint, size int, available ...int) []int {
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

// While the driver does not say how the GPUs are linked, requests are answered all the same, as if they were linked alike.
func TestServeAnswersWhileLinksCannotBeRead(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	mustDo(t, s.node.Hang("nvmlDeviceGetTopologyCommonAncestor", sim.AnyGPU))
	s.start()
	e := s.listed(gpuResource, 4, 0)
	for range 10 { // before the links are read, and while they are
		if chosen := s.prefers(e, 2, 0, 1, 2, 3); !slices.Equal(chosen, []int{0, 1}) {
			t.Errorf("GPUs %v are preferred, want 0 and 1", chosen)
		}
		time.Sleep(linksDelay / 2)
	}
	mustDo(t, s.node.Clear())
	waitFor(t, "the preference", func() bool { return slices.Equal(s.prefers(e, 2, 0, 1, 2, 3), []int{2, 3}) })
}
