package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// Preference says which of the available devices are best for a container.
type Preference struct {
	// Node tells how the GPUs are connected; it is asked at each Update. Where it is nil, or returns nil, they are taken to
	// be connected alike.
	Node func() *allocator.Node
	// Policy is for GPUs, and SharedPolicy for replicas and MIG devices. Empty means allocator.Topology and
	// allocator.Spread.
	Policy, SharedPolicy allocator.Policy
	// used is Plugin.usedSlices, or nil where no other resource is known.
	used func(except string) (map[string]int, error)
}

// preference is Preference for one list of devices.
type preference struct {
	pool   *allocator.Pool
	policy allocator.Policy
	// bySlices is set where the policy asks how full GPUs are: MIG devices are packed.
	bySlices bool
}

// of prepares the preference for a resource.
func (p *Preference) of(r *resource.Resource) (preference, error) {
	node, err := p.node(r)
	if err != nil {
		return preference{}, fmt.Errorf("list %s: %w", r.Name, err)
	}
	policy, mig := cmp.Or(p.Policy, allocator.Topology), false
	devices := make([]allocator.Device, len(r.Devices))
	for i := range r.Devices {
		d := &r.Devices[i]
		devices[i] = allocator.Device{ID: d.ID, UUID: d.UUID, Parent: d.Parent, Replica: d.Shared(), Slices: computeSlices(d), Unusable: !d.Healthy}
		mig = mig || d.MIGIndex != resource.NoMIG
		if d.Shared() || d.MIGIndex != resource.NoMIG {
			policy = cmp.Or(p.SharedPolicy, allocator.Spread)
		}
	}
	return preference{allocator.NewPool(node, devices), policy, mig && policy == allocator.Pack}, nil
}

func (p *Preference) node(r *resource.Resource) (*allocator.Node, error) {
	if p.Node != nil {
		if n := p.Node(); n != nil {
			return n, nil
		}
	}
	alike := &gpu.Snapshot{}
	seen := map[string]bool{}
	for i := range r.Devices {
		if d := &r.Devices[i]; !seen[d.Parent] {
			seen[d.Parent] = true
			alike.Devices = append(alike.Devices, gpu.Device{Index: d.Index, UUID: d.Parent, NUMANode: d.NUMANode})
		}
	}
	return allocator.NewNode(alike, allocator.DefaultWeights())
}

// GetPreferredAllocation chooses the best of the available devices by the policy. The codes of its errors are
//
//	InvalidArgument     a device twice, one that must be included but is not available, or a size that cannot be
//	NotFound            a device that is not in the list
//	FailedPrecondition  there are not enough devices without unhealthy ones, or such a one must be included
func (s *server) GetPreferredAllocation(_ context.Context, req *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	l := s.list.Load()
	resp := &v1beta1.PreferredAllocationResponse{}
	used := s.usedSlices(l)
	for _, c := range req.GetContainerRequests() {
		choice, err := l.prefer.pool.Choose(l.prefer.policy, allocator.Request{
			Available: c.GetAvailableDeviceIDs(), Must: c.GetMustIncludeDeviceIDs(), Size: int(c.GetAllocationSize()),
			Used: used,
		})
		if err != nil {
			return nil, l.notPreferred(err)
		}
		resp.ContainerResponses = append(resp.ContainerResponses, &v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: choice.IDs})
	}
	return resp, nil
}

// usedSlices returns the compute slices that pods have of each GPU as MIG devices of other resources, where the policy
// asks for them. Without them those of this resource alone count.
func (s *server) usedSlices(l *list) map[string]int {
	if !l.prefer.bySlices || s.options.Preference.used == nil {
		return nil
	}
	used, err := s.options.Preference.used(l.resource.Name)
	if err != nil {
		s.log.Debug("MIG devices are packed without regard to those of other profiles: " + err.Error())
	}
	return used
}

// notPreferred is the error of a request as a status.
func (l *list) notPreferred(err error) error {
	name := l.resource.Name
	wrong, ok := errors.AsType[*allocator.RequestError](err)
	switch {
	case !ok:
		return status.Errorf(codes.Internal, "prefer %s: %v", name, err)
	case wrong.Reason == allocator.Unknown:
		return status.Errorf(codes.NotFound, "prefer %s: %v", name, err)
	case wrong.Reason == allocator.Unusable:
		var unhealthy someOf
		for _, id := range wrong.IDs {
			unhealthy.add(id, l.devices[id].Reason)
		}
		return status.Errorf(codes.FailedPrecondition, "prefer %s: %d devices are asked for, and cannot be had without unhealthy ones: %s",
			name, wrong.Size, &unhealthy)
	}
	return status.Errorf(codes.InvalidArgument, "prefer %s: %v", name, err)
}
