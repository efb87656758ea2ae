package kubelet

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

// Devices are IDs of devices, sorted, by the name of their resource.
type Devices map[string][]string

// Assigned asks the kubelet's PodResources service which devices each pod has, by the names of the pods' manifests.
func (n *Node) Assigned(ctx context.Context) (map[string]Devices, error) {
	pods := map[string]Devices{}
	err := n.podResources(ctx, func(ctx context.Context, c podresources.PodResourcesListerClient) error {
		resp, err := c.List(ctx, &podresources.ListPodResourcesRequest{})
		for _, p := range resp.GetPodResources() {
			name := strings.TrimSuffix(p.GetName(), "-"+nodeName)
			pods[name] = Devices{}
			for _, c := range p.GetContainers() {
				pods[name].add(c.GetDevices())
			}
		}
		return err
	})
	return pods, err
}

// Allocatable asks the kubelet which devices are healthy, whether a pod has them or not.
func (n *Node) Allocatable(ctx context.Context) (Devices, error) {
	all := Devices{}
	err := n.podResources(ctx, func(ctx context.Context, c podresources.PodResourcesListerClient) error {
		resp, err := c.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		all.add(resp.GetDevices())
		return err
	})
	return all, err
}

// add adds devices. A device on several NUMA nodes is listed once for each.
func (d Devices) add(devices []*podresources.ContainerDevices) {
	for _, dev := range devices {
		ids := append(d[dev.GetResourceName()], dev.GetDeviceIds()...)
		slices.Sort(ids)
		d[dev.GetResourceName()] = slices.Compact(ids)
	}
}

func (n *Node) podResources(ctx context.Context, f func(context.Context, podresources.PodResourcesListerClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	socket := n.Host("/var/lib/kubelet/pod-resources/kubelet.sock")
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := f(ctx, podresources.NewPodResourcesListerClient(conn)); err != nil {
		return fmt.Errorf("ask the kubelet for the devices of pods: %w", err)
	}
	return nil
}
