// Package holderstest has the kubelet's PodResources service, for tests.
package holderstest

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Kubelet answers List; the other calls are not implemented.
type Kubelet struct {
	podresources.UnimplementedPodResourcesListerServer

	Pods []*podresources.PodResources
	Err  error
}

// List implements the service.
func (k *Kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return &podresources.ListPodResourcesResponse{PodResources: k.Pods}, k.Err
}

// Serve answers on a socket until stop is called.
func (k *Kubelet) Serve(socket string) (stop func(), err error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("serve PodResources: %w", err)
	}
	s := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(s, k)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // stop ends it
	}()
	return func() { s.Stop(); <-done }, nil
}

// Pod is a pod of one container that holds devices of a resource.
func Pod(namespace, name, container, resource string, ids ...string) *podresources.PodResources {
	return &podresources.PodResources{
		Namespace: namespace, Name: name,
		Containers: []*podresources.ContainerResources{{
			Name: container, Devices: []*podresources.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
		}},
	}
}
