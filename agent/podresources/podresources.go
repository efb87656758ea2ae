// Package podresources reads from the kubelet which containers have which devices; a container that has a device is
// its holder. It uses the PodResources service (k8s.io/kubelet/pkg/apis/podresources/v1), which covers the devices of
// all device plugins, and all ResourceClaims.
package podresources

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	timeout    = 5 * time.Second
	mostAnswer = 16 << 20 // bytes; the limit of the kubelet's own clients
	// retries repeats calls that exceed the kubelet's rate limit, which is 10 calls at once and then 100 each second.
	retries = `{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.05s",
		"maxBackoff": "0.5s", "backoffMultiplier": 2, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}`
)

// List returns the containers that have devices or claims, sorted by namespace, pod and container, as the kubelet at a
// socket reports them. If the socket does not exist, the error wraps fs.ErrNotExist.
func List(ctx context.Context, socket string) ([]Holder, error) {
	var resp *v1.ListPodResourcesResponse
	err := call(ctx, socket, func(ctx context.Context, c v1.PodResourcesListerClient) (err error) {
		resp, err = c.List(ctx, &v1.ListPodResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the pods' devices from the kubelet's socket %s: %w", socket, err)
	}
	return fromPods(resp.GetPodResources()), nil
}

// Allocatable returns the IDs of the devices that the kubelet at a socket would give to pods or has given to them, by
// resource: the healthy ones of each plugin.
func Allocatable(ctx context.Context, socket string) (map[string]map[string]bool, error) {
	var resp *v1.AllocatableResourcesResponse
	err := call(ctx, socket, func(ctx context.Context, c v1.PodResourcesListerClient) (err error) {
		resp, err = c.GetAllocatableResources(ctx, &v1.AllocatableResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the allocatable devices from the kubelet's socket %s: %w", socket, err)
	}
	all := map[string]map[string]bool{}
	for _, d := range resp.GetDevices() {
		ids := all[d.GetResourceName()]
		if ids == nil {
			ids = map[string]bool{}
			all[d.GetResourceName()] = ids
		}
		for _, id := range d.GetDeviceIds() {
			ids[id] = true
		}
	}
	return all, nil
}

// call calls the PodResources service at a socket.
func call(ctx context.Context, socket string, f func(context.Context, v1.PodResourcesListerClient) error) error {
	if _, err := os.Stat(socket); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := grpc.NewClient(
		"passthrough:///kubelet", // the path may have characters that are special in a URL
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}),
		grpc.WithDefaultServiceConfig(retries),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostAnswer)),
	)
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(ctx, v1.NewPodResourcesListerClient(conn))
}

// fromPods returns the containers that have devices or claims. The kubelet lists a device once for each of its NUMA
// nodes.
func fromPods(pods []*v1.PodResources) []Holder {
	list := []Holder{}
	for _, p := range pods {
		for _, c := range p.GetContainers() {
			h := Holder{
				Namespace: p.GetNamespace(), Pod: p.GetName(), Container: c.GetName(), ByResource: map[string][]string{},
			}
			for _, d := range c.GetDevices() {
				h.Devices = append(h.Devices, d.GetDeviceIds()...)
				h.ByResource[d.GetResourceName()] = append(h.ByResource[d.GetResourceName()], d.GetDeviceIds()...)
			}
			h.Devices, h.Claims = sorted(h.Devices), claims(c.GetDynamicResources())
			if len(h.Devices) > 0 || len(h.Claims) > 0 {
				list = append(list, h)
			}
		}
	}
	slices.SortStableFunc(list, func(a, b Holder) int {
		return cmp.Or(
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container),
			slices.Compare(a.Devices, b.Devices),
		)
	})
	return list
}

// claims returns the claims of a container. The kubelet may list one more than once.
func claims(list []*v1.DynamicResource) []Claim {
	devices := map[string]map[string][]string{}
	for _, r := range list {
		name := r.GetClaimNamespace() + "/" + r.GetClaimName()
		if devices[name] == nil {
			devices[name] = map[string][]string{}
		}
		for _, d := range r.GetClaimResources() {
			driver := d.GetDriverName()
			devices[name][driver] = append(devices[name][driver], d.GetDeviceName())
		}
	}
	var claims []Claim
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		for driver := range devices[name] {
			devices[name][driver] = sorted(devices[name][driver])
		}
		claims = append(claims, Claim{name, devices[name]})
	}
	return claims
}

func sorted(list []string) []string {
	slices.Sort(list)
	return slices.Compact(list)
}
