package main

import (
	"slices"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
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
			return slices.Equal(s.prefers(s.kubelet.WaitListed(gpuResource, healthy, lost), 2, 0, 1, 2, 3), want)
		})
	}
	preferred(4, 0, 2, 3)

	// A GPU that is lost leaves the candidates; the others are served.
	testenv.Must(t, s.node.Lose(2))
	s.signal(syscall.SIGHUP)
	preferred(3, 1, 0, 1)
	testenv.Must(t, s.node.ClearGPU(2))
	s.signal(syscall.SIGHUP)
	preferred(4, 0, 2, 3)

	// Other weights hold from the reload on.
	s.configure("allocation: {weights: {node: 100}}")
	s.signal(syscall.SIGHUP)
	preferred(4, 0, 0, 1)
}

// The first answer is as right as all others: the kubelet asks as soon as the resource is registered. By PCIe and NUMA
// nodes only, 4 and 5 would be nearest.
func TestServesFirstPreferenceIsRight(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx1-v100", "")
	s.start()
	if got := s.prefers(s.kubelet.WaitListed(gpuResource, 8, 0), 2, 0, 4, 5); !slices.Equal(got, []int{0, 4}) {
		t.Errorf("of 0, 4 and 5 %v are preferred", got)
	}
}
