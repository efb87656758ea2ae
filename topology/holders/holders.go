// Package holders asks the kubelet which containers hold which devices.
//
// The answer comes from the kubelet's PodResources service (k8s.io/kubelet/pkg/apis/podresources/v1), which tells it for
// the devices of all device plugins. The package only reads; it decides nothing.
package holders

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpu-cdi-plugin/topology"
)

// Socket is where the kubelet serves PodResources unless it is told otherwise.
const Socket = "/var/lib/kubelet/pod-resources/kubelet.sock"

const (
	patience   = 5 * time.Second
	mostAnswer = 16 << 20 // bytes; what the kubelet's own clients allow
)

// List asks the kubelet behind a socket for the containers that hold devices, sorted by namespace, pod and container.
// Where there is no such socket the error wraps fs.ErrNotExist.
func List(ctx context.Context, socket string) ([]topology.Holder, error) {
	if _, err := os.Stat(socket); err != nil {
		return nil, fmt.Errorf("look for the kubelet's PodResources socket: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := grpc.NewClient(
		"passthrough:///kubelet", // a path may have characters that mean something in a URL
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostAnswer)),
	)
	if err != nil {
		return nil, fmt.Errorf("prepare to speak to the kubelet on %s: %w", socket, err)
	}
	defer conn.Close()
	resp, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet on %s who holds which device: %w", socket, err)
	}
	return fromPods(resp.GetPodResources()), nil
}

// fromPods leaves out what holds no device. The kubelet names a device once for each of its NUMA nodes.
func fromPods(pods []*podresources.PodResources) []topology.Holder {
	list := []topology.Holder{}
	for _, p := range pods {
		for _, c := range p.GetContainers() {
			h := topology.Holder{Namespace: p.GetNamespace(), Pod: p.GetName(), Container: c.GetName()}
			for _, d := range c.GetDevices() {
				h.Devices = append(h.Devices, d.GetDeviceIds()...)
			}
			slices.Sort(h.Devices)
			if h.Devices = slices.Compact(h.Devices); len(h.Devices) > 0 {
				list = append(list, h)
			}
		}
	}
	slices.SortStableFunc(list, func(a, b topology.Holder) int {
		return cmp.Or(
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container),
			slices.Compare(a.Devices, b.Devices),
		)
	})
	return list
}
