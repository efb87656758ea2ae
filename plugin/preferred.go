package plugin

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// GetPreferredAllocation chooses among the available devices: those that must be included, then on the GPU that has
// fewest of the chosen ones, then the first in the list. A request that no choice fulfils is InvalidArgument.
func (s *server) GetPreferredAllocation(_ context.Context, req *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	l := s.list.Load()
	resp := &v1beta1.PreferredAllocationResponse{}
	for _, c := range req.GetContainerRequests() {
		chosen, err := l.prefer(c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		if err != nil {
			return nil, err
		}
		resp.ContainerResponses = append(resp.ContainerResponses, &v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: chosen})
	}
	return resp, nil
}

// prefer chooses size of the available IDs. Those that the list does not know, or knows to be unhealthy, are the last:
// the kubelet's picture may be a moment older, and what it does with the answer is its own affair.
func (l *list) prefer(available, must []string, size int) ([]string, error) {
	available, must = unique(available), unique(must)
	if err := l.possible(available, must, size); err != nil {
		return nil, err
	}
	chosen := append(make([]string, 0, size), must...)
	perGPU := map[string]int{}
	for _, id := range must {
		perGPU[l.parent(id)]++
	}
	// What is left is sorted by GPU; each round takes the first of the GPU that has fewest.
	left := l.byParent(available, must)
	for len(chosen) < size {
		next := fewest(left, perGPU)
		chosen = append(chosen, next.ids[0])
		next.ids = next.ids[1:]
		perGPU[next.parent]++
	}
	return chosen, nil
}

func (l *list) possible(available, must []string, size int) error {
	var missing someOf
	for _, id := range must {
		if _, ok := slices.BinarySearch(available, id); !ok {
			missing.add(id, "")
		}
	}
	name := l.resource.Name
	switch {
	case size < 0:
		return status.Errorf(codes.InvalidArgument, "prefer %s: %d devices are asked for", name, size)
	case missing.n > 0:
		return status.Errorf(codes.InvalidArgument, "prefer %s: must be included, but not available: %s", name, &missing)
	case size < len(must):
		return status.Errorf(codes.InvalidArgument, "prefer %s: %d devices are asked for, and %d must be included", name, size, len(must))
	case size > len(available):
		return status.Errorf(codes.InvalidArgument, "prefer %s: %d devices are asked for, and %d are available", name, size, len(available))
	}
	return nil
}

// unique returns the IDs sorted, each once.
func unique(ids []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(ids)))
}

// parent is the GPU of a device that can be given out, or empty.
func (l *list) parent(id string) string {
	if d := l.devices[id]; d != nil && d.Healthy {
		return d.Parent
	}
	return ""
}

// candidates are what can be chosen of one GPU.
type candidates struct {
	parent string
	ids    []string
}

// byParent groups the available IDs that need not be included, in the order of the list.
func (l *list) byParent(available, must []string) []*candidates {
	rest := slices.DeleteFunc(slices.Clone(available), func(id string) bool {
		_, ok := slices.BinarySearch(must, id)
		return ok
	})
	slices.SortStableFunc(rest, func(a, b string) int { return l.placeOf(a) - l.placeOf(b) })
	var groups []*candidates
	byParent := map[string]*candidates{}
	for _, id := range rest {
		parent := l.parent(id)
		g := byParent[parent]
		if g == nil {
			g = &candidates{parent: parent}
			byParent[parent] = g
			groups = append(groups, g)
		}
		g.ids = append(g.ids, id)
	}
	return groups
}

// placeOf is a device's place in the list; those that should not be chosen come after it.
func (l *list) placeOf(id string) int {
	if l.parent(id) == "" {
		return len(l.devices)
	}
	return l.devices[id].place
}

// fewest is the first group that has something left and whose GPU has fewest chosen devices. What has no GPU is taken
// only when nothing else is left.
func fewest(groups []*candidates, perGPU map[string]int) *candidates {
	var best *candidates
	for _, g := range groups {
		switch {
		case len(g.ids) == 0:
		case best == nil, best.parent == "", g.parent != "" && perGPU[g.parent] < perGPU[best.parent]:
			best = g
		}
	}
	return best
}
