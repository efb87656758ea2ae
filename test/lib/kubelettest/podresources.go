package kubelettest

import (
	"context"
	"fmt"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// PodResources is the kubelet's PodResources service. It implements List and, if there are Allocatable devices,
// GetAllocatableResources.
type PodResources struct {
	podresources.UnimplementedPodResourcesListerServer

	Pods []*podresources.PodResources // while it serves, use Set
	// Allocatable are IDs of devices by resource; nil means that the call is not implemented.
	Allocatable map[string][]string
	Err         error
	Busy        int // how many calls of List to reject first, like the kubelet's rate limit

	mu    sync.Mutex
	lists int
}

// Set replaces the pods.
func (p *PodResources) Set(pods ...*podresources.PodResources) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Pods = pods
}

// Lists returns how often the pods were listed.
func (p *PodResources) Lists() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lists
}

// List returns the pods and the error.
func (p *PodResources) List(
	context.Context, *podresources.ListPodResourcesRequest,
) (*podresources.ListPodResourcesResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lists++
	if p.Busy > 0 {
		p.Busy--
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	return &podresources.ListPodResourcesResponse{PodResources: p.Pods}, p.Err
}

// GetAllocatableResources returns the allocatable devices.
func (p *PodResources) GetAllocatableResources(
	ctx context.Context, r *podresources.AllocatableResourcesRequest,
) (*podresources.AllocatableResourcesResponse, error) {
	if p.Allocatable == nil {
		return p.UnimplementedPodResourcesListerServer.GetAllocatableResources(ctx, r)
	}
	resp := &podresources.AllocatableResourcesResponse{}
	for resource, ids := range p.Allocatable {
		for _, id := range ids { // as if each device were on another NUMA node
			device := &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}}
			resp.Devices = append(resp.Devices, device)
		}
	}
	return resp, nil
}

// Serve serves on a socket until stop is called.
func (p *PodResources) Serve(socket string) (stop func(), err error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("serve PodResources: %w", err)
	}
	s := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(s, p)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // stop ends it
	}()
	return func() { s.Stop(); <-done }, nil
}

// Pod returns a pod with one container that holds devices of a resource.
func Pod(namespace, name, container, resource string, ids ...string) *podresources.PodResources {
	return &podresources.PodResources{
		Namespace: namespace, Name: name,
		Containers: []*podresources.ContainerResources{{
			Name: container, Devices: []*podresources.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
		}},
	}
}

// PodWithClaim returns a pod with one container that has devices by a ResourceClaim of the pod's namespace.
func PodWithClaim(namespace, name, container, claim string, devices ...string) *podresources.PodResources {
	r := &podresources.DynamicResource{ClaimNamespace: namespace, ClaimName: claim}
	for _, d := range devices {
		r.ClaimResources = append(r.ClaimResources, &podresources.ClaimResource{DriverName: "gpu.nvidia.com", DeviceName: d})
	}
	c := &podresources.ContainerResources{Name: container, DynamicResources: []*podresources.DynamicResource{r}}
	return &podresources.PodResources{
		Namespace: namespace, Name: name, Containers: []*podresources.ContainerResources{c},
	}
}
