package kubenode

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Devices has the sorted IDs of devices by resource.
type Devices map[string][]string

// Assigned returns the devices of each pod, by the pod's name in its manifest, from the kubelet's PodResources service.
func (n *Node) Assigned(ctx context.Context) (map[string]Devices, error) {
	pods := map[string]Devices{}
	err := n.podResources(ctx, func(ctx context.Context, c podresources.PodResourcesListerClient) error {
		resp, err := c.List(ctx, &podresources.ListPodResourcesRequest{})
		for _, p := range resp.GetPodResources() {
			name := strings.TrimSuffix(p.GetName(), "-"+n.name)
			pods[name] = Devices{}
			for _, c := range p.GetContainers() {
				pods[name].add(c.GetDevices())
			}
		}
		return err
	})
	return pods, err
}

// Allocatable returns the devices that the kubelet reports as healthy, allocated or not.
func (n *Node) Allocatable(ctx context.Context) (Devices, error) {
	all := Devices{}
	err := n.podResources(ctx, func(ctx context.Context, c podresources.PodResourcesListerClient) error {
		resp, err := c.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		all.add(resp.GetDevices())
		return err
	})
	return all, err
}

// add adds devices. The kubelet lists a device on several NUMA nodes once for each node.
func (d Devices) add(devices []*podresources.ContainerDevices) {
	for _, dev := range devices {
		ids := append(d[dev.GetResourceName()], dev.GetDeviceIds()...)
		slices.Sort(ids)
		d[dev.GetResourceName()] = slices.Compact(ids)
	}
}

func (n *Node) podResources(
	ctx context.Context, f func(context.Context, podresources.PodResourcesListerClient) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	socket := n.Host("/var/lib/kubelet/pod-resources/kubelet.sock")
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := f(ctx, podresources.NewPodResourcesListerClient(conn)); err != nil {
		return fmt.Errorf("call the kubelet's PodResources service: %w", err)
	}
	return nil
}
