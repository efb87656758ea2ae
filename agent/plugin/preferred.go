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

// Preference configures which of the available devices GetPreferredAllocation returns.
type Preference struct {
	// Policy is for GPUs, and SharedPolicy for replicas and MIG devices. If they are empty, they are
	// allocator.Topology and allocator.Spread.
	Policy, SharedPolicy allocator.Policy
	// Held returns the IDs of the devices that pods hold, of all resources; optional. It must return at once. The
	// kubelet's request does not have those of other resources.
	Held func() map[string]bool
}

// preference is what GetPreferredAllocation needs for one list of devices.
type preference struct {
	pool   *allocator.Pool
	policy allocator.Policy
	// bySlices is set if MIG devices are packed: then the choice depends on how many compute slices of each GPU are
	// allocated.
	bySlices bool
}

// of returns the preference for a resource. Without gpus all GPUs count as equally well connected.
func (p *Preference) of(r *resource.Resource, gpus *allocator.GPUs) (preference, error) {
	if gpus == nil {
		var err error
		if gpus, err = unconnected(r); err != nil {
			return preference{}, fmt.Errorf("advertise %s: %w", r.Name, err)
		}
	}
	policy, mig := cmp.Or(p.Policy, allocator.Topology), false
	devices := make([]allocator.Device, len(r.Devices))
	for i := range r.Devices {
		d := &r.Devices[i]
		devices[i] = allocator.Device{
			ID: d.ID, UUID: d.UUID, Parent: d.Parent,
			Replica: d.Shared(), Slices: computeSlices(d), Unusable: !d.Healthy && !d.InUse,
		}
		mig = mig || d.MIGIndex != resource.NoMIG
		if d.Shared() || d.MIGIndex != resource.NoMIG {
			policy = cmp.Or(p.SharedPolicy, allocator.Spread)
		}
	}
	return preference{allocator.NewPool(gpus, devices), policy, mig && policy == allocator.Pack}, nil
}

// unconnected returns the GPUs of a resource without their links.
func unconnected(r *resource.Resource) (*allocator.GPUs, error) {
	s := &gpu.Snapshot{}
	for i := range r.Devices { // devices of one GPU count once
		d := &r.Devices[i]
		g := gpu.Device{Index: d.Index, UUID: d.Parent, NUMANode: d.NUMANode}
		s.Devices = append(s.Devices, g)
	}
	return allocator.NewGPUs(s, allocator.DefaultWeights())
}

// GetPreferredAllocation chooses the best of the available devices by the policy. The codes of its errors are
//
//	InvalidArgument     a device is given twice, one that must be included is not available, or the size is impossible
//	NotFound            a device is not advertised
//	FailedPrecondition  there are not enough healthy devices, or an unhealthy one must be included
func (s *server) GetPreferredAllocation(
	_ context.Context, req *v1beta1.PreferredAllocationRequest,
) (*v1beta1.PreferredAllocationResponse, error) {
	l := s.list.Load()
	resp := &v1beta1.PreferredAllocationResponse{}
	var used map[string]int
	if l.prefer.bySlices {
		used = s.used(l.resource.Name)
	}
	for _, c := range req.GetContainerRequests() {
		choice, err := l.prefer.pool.Choose(l.prefer.policy, allocator.Request{
			Available: c.GetAvailableDeviceIDs(), Must: c.GetMustIncludeDeviceIDs(), Size: int(c.GetAllocationSize()),
			Used: used,
		})
		if err != nil {
			return nil, l.preferenceStatus(err)
		}
		resp.ContainerResponses = append(resp.ContainerResponses,
			&v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: choice.IDs})
	}
	return resp, nil
}

// preferenceStatus returns the gRPC status for an error of the allocator.
func (l *list) preferenceStatus(err error) error {
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
		return status.Errorf(codes.FailedPrecondition, "prefer %s: a request for %d needs unhealthy devices: %s",
			name, wrong.Size, unhealthy)
	}
	return status.Errorf(codes.InvalidArgument, "prefer %s: %v", name, err)
}
