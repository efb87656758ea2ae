package behaviour

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"gpu-cdi-plugin/test/lib/testenv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	podresourcesv1alpha1 "k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
)

var podResources = []Case{
	{
		Name:    "List has the active pods with their devices, one entry for each device and NUMA node",
		Mirrors: "TestListPodResourcesV1, TestGetContainerDevices",
		Run: func(n *Node) {
			n.plug(gpu, device("a"), device("b", 0), device("c", 0, 1))
			n.plug(nic, device("n0", 1))
			n.admit(pod("a", container("main", limits{gpu: 3, nic: 1}), container("plain", nil)))
			n.admit(pod("b", container("main", nil)))
			n.equal("pods", []string{
				"default/a main: example.com/gpu=a, example.com/gpu=b@0, example.com/gpu=c@0, example.com/gpu=c@1, " +
					"example.com/nic=n0@1",
				"default/a plain: ", "default/b main: ",
			}, n.listPods())
		},
	},
	{
		Name:    "pods are added to List and removed from it",
		Mirrors: "TestListPodResourcesUsesOnlyActivePods; e2e podresources_test.go",
		Run: func(n *Node) {
			n.plug(gpu, numbered(2)...)
			n.equal("pods", 0, len(n.listPods()))
			n.admit(single("a", 1))
			n.admit(single("b", 1))
			n.refuse(single("c", 1), "Available: 0")
			n.equal("number of pods", 2, len(n.listPods()))
			n.release(single("a", 1))
			n.equal(
				"pods",
				[]string{"default/b main: example.com/gpu=" + n.has(single("b", 1), "main")[0]},
				n.listPods(),
			)
		},
	},
	{
		Name:    "List has sidecars before containers, and no other init containers",
		Mirrors: "TestListPodResourcesWithInitContainersV1; e2e: init and sidecar",
		Run: func(n *Node) {
			n.plug(gpu, numbered(3)...)
			p := withInit(single("a", 1), container("init", limits{gpu: 1}), sidecar("side", limits{gpu: 1}))
			n.admit(p)
			want := []string{
				"default/a side: example.com/gpu=" + n.has(p, "side")[0],
				"default/a main: example.com/gpu=" + n.has(p, "main")[0],
			}
			n.equal("pods", want, n.listPods())
			n.equal("the pod", want, n.getPod("a"))
		},
	},
	{
		Name:    "Get has one pod, and says which one it does not find",
		Mirrors: "TestGetPodResourcesV1",
		Run: func(n *Node) {
			n.plug(gpu, device("a", 1))
			n.admit(single("a", 1))
			n.equal("the pod", []string{"default/a main: example.com/gpu=a@1"}, n.getPod("a"))
			_, err := n.podResources().Get(n.Context(),
				&podresourcesv1.GetPodResourcesRequest{PodName: "b", PodNamespace: "default"})
			if err == nil || !strings.Contains(err.Error(), "pod b in namespace default not found") {
				n.Errorf("get a pod that is not there: %v", err)
			}
		},
	},
	{
		Name:    "GetAllocatableResources has the healthy devices, whether a pod has them or not",
		Mirrors: "TestGetAllocatableDevicesMultipleResources, ...HealthTransition; TestAllocatableResources",
		Run: func(n *Node) {
			p := n.plug(gpu, device("a", 0, 1), device("b"), unhealthy("c"))
			n.plug(nic, device("n0"))
			n.admit(single("a", 2))
			want := []string{"example.com/gpu=a@0", "example.com/gpu=a@1", "example.com/gpu=b", "example.com/nic=n0"}
			n.equal("allocatable", want, n.allocatable())
			p.SetDevices(unhealthy("a"), device("b"), device("c"), device("d"))
			n.awaitCounts(gpu, Counts{Capacity: 4, Allocatable: 3})
			want = []string{"example.com/gpu=b", "example.com/gpu=c", "example.com/gpu=d", "example.com/nic=n0"}
			n.equal("allocatable after a change", want, n.allocatable())
			p.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 4, Allocatable: 0})
			n.equal("allocatable without the plugin", []string{"example.com/nic=n0"}, n.allocatable())
		},
	},
	{
		Name:    "a device with a topology without nodes",
		Mirrors: "B13",
		Kubelet: "is missing in GetAllocatableResources",
		Here:    "is in GetAllocatableResources, without a NUMA node",
		Run: func(n *Node) {
			n.plug(
				gpu,
				&v1beta1.Device{ID: "a", Health: v1beta1.Healthy, Topology: &v1beta1.TopologyInfo{}},
				device("b"),
			)
			want := []string{"example.com/gpu=a", "example.com/gpu=b"}
			if n.faulty() {
				want = want[1:]
			}
			n.equal("allocatable", want, n.allocatable())
			n.admit(single("a", 2))
			n.equal("pods", []string{"default/a main: example.com/gpu=a, example.com/gpu=b"}, n.listPods())
		},
	},
	{
		Name:    "v1alpha1 lists containers without topology, and no sidecars",
		Mirrors: "TestListPodResourcesV1alpha1",
		Run: func(n *Node) {
			n.plug(gpu, device("a", 0, 1), device("b"))
			n.admit(withInit(single("a", 1), sidecar("side", limits{gpu: 1})))
			conn, err := dial(n.PodResources())
			testenv.Must(n, err)
			defer conn.Close()
			res, err := podresourcesv1alpha1.NewPodResourcesListerClient(conn).List(n.Context(),
				&podresourcesv1alpha1.ListPodResourcesRequest{})
			if err != nil || len(res.PodResources) != 1 || len(res.PodResources[0].Containers) != 1 {
				n.Fatalf("list: %v, %v", res, err)
			}
			c := res.PodResources[0].Containers[0]
			var ids []string
			for _, d := range c.Devices {
				ids = append(ids, d.DeviceIds...)
			}
			n.equal("the container", "main", c.Name)
			n.equal("devices", n.has(single("a", 1), "main"), slices.Compact(slices.Sorted(slices.Values(ids))))
		},
	},
	{
		Name:    "more than a hundred calls per second are refused",
		Mirrors: "e2e podresources_test.go: limiter rejects in a 200-call loop",
		Run: func(n *Node) {
			client := n.podResources()
			var refused atomic.Bool
			n.await("a call is refused", func() bool { // a busy machine may need more than a second for 200
				var calls sync.WaitGroup
				for range 200 {
					calls.Go(func() {
						_, err := client.List(n.Context(), &podresourcesv1.ListPodResourcesRequest{})
						if err == nil {
							return
						}
						if status.Code(err) != codes.ResourceExhausted ||
							!strings.Contains(err.Error(), "rejected by rate limit") {
							n.Error(err)
						}
						refused.Store(true)
					})
				}
				calls.Wait()
				return refused.Load()
			})
		},
	},
}

func (n *Node) podResources() podresourcesv1.PodResourcesListerClient {
	n.Helper()
	conn, err := dial(n.PodResources())
	testenv.Must(n, err)
	n.Cleanup(func() { _ = conn.Close() })
	return podresourcesv1.NewPodResourcesListerClient(conn)
}

// listPods returns a line for each container of List. It sorts the pods, since the kubelet's order is random.
func (n *Node) listPods() (lines []string) {
	n.Helper()
	res, err := n.podResources().List(n.Context(), &podresourcesv1.ListPodResourcesRequest{})
	if err != nil {
		n.Error(err)
		return nil
	}
	slices.SortFunc(res.PodResources, func(a, b *podresourcesv1.PodResources) int {
		return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
	})
	for _, p := range res.PodResources {
		lines = append(lines, containerLines(p)...)
	}
	return lines
}

func (n *Node) getPod(name string) []string {
	n.Helper()
	res, err := n.podResources().Get(n.Context(),
		&podresourcesv1.GetPodResourcesRequest{PodName: name, PodNamespace: "default"})
	if err != nil {
		n.Error(err)
		return nil
	}
	return containerLines(res.PodResources)
}

func containerLines(p *podresourcesv1.PodResources) (lines []string) {
	for _, c := range p.Containers {
		devices := strings.Join(deviceNames(c.Devices), ", ")
		lines = append(lines, fmt.Sprintf("%s/%s %s: %s", p.Namespace, p.Name, c.Name, devices))
	}
	return lines
}

// deviceNames returns the devices as RESOURCE=ID@NODE, sorted, one for each entry and ID.
func deviceNames(list []*podresourcesv1.ContainerDevices) (names []string) {
	for _, d := range list {
		for _, id := range d.DeviceIds {
			parts := []string{d.ResourceName + "=" + id}
			for _, node := range d.GetTopology().GetNodes() {
				parts = append(parts, strconv.FormatInt(node.ID, 10))
			}
			names = append(names, strings.Join(parts, "@"))
		}
	}
	slices.Sort(names)
	return names
}

func (n *Node) allocatable() []string {
	n.Helper()
	res, err := n.podResources().GetAllocatableResources(context.Background(),
		&podresourcesv1.AllocatableResourcesRequest{})
	if err != nil {
		n.Error(err)
		return nil
	}
	return deviceNames(res.Devices)
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
}
