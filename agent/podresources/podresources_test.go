package podresources_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestList(t *testing.T) {
	twoContainers := kubelettest.Pod("a", "p", "z", "nvidia.com/gpu", "GPU-1", "GPU-2")
	twoContainers.Containers = append(twoContainers.Containers, &v1.ContainerResources{
		Name: "b",
		Devices: []*v1.ContainerDevices{ // one device on two NUMA nodes, and one of another resource
			{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-3"}},
			{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-3"}},
			{ResourceName: "example.com/nic", DeviceIds: []string{"eth1"}},
		},
	})
	twoClaims := kubelettest.PodWithClaim("b", "q", "c", "two", "gpu-2", "gpu-1")
	two := twoClaims.GetContainers()[0].GetDynamicResources()[0]
	twoClaims.Containers[0].DynamicResources = append(twoClaims.Containers[0].DynamicResources,
		&v1.DynamicResource{ClaimNamespace: "b", ClaimName: "one"}, two)
	for name, c := range map[string]struct {
		pods []*v1.PodResources
		want []podresources.Holder
	}{
		"no pods": {nil, []podresources.Holder{}},
		"a pod without devices": {
			[]*v1.PodResources{{
				Namespace: "a", Name: "p", Containers: []*v1.ContainerResources{{Name: "c"}},
			}},
			[]podresources.Holder{},
		},
		"claims, each once": {
			[]*v1.PodResources{twoClaims},
			[]podresources.Holder{{
				Namespace: "b", Pod: "q", Container: "c", ByResource: map[string][]string{},
				Claims: []podresources.Claim{
					{Name: "b/one", Devices: map[string][]string{}},
					{Name: "b/two", Devices: map[string][]string{"gpu.nvidia.com": {"gpu-1", "gpu-2"}}},
				},
			}},
		},
		"sorted, each device once": {
			[]*v1.PodResources{kubelettest.Pod("b", "q", "c", "nvidia.com/gpu", "GPU-0::1"), twoContainers},
			[]podresources.Holder{
				{
					Namespace: "a", Pod: "p", Container: "b", Devices: []string{"GPU-3", "eth1"},
					ByResource: map[string][]string{"nvidia.com/gpu": {"GPU-3", "GPU-3"}, "example.com/nic": {"eth1"}},
				},
				holder("p", "z", "nvidia.com/gpu", "GPU-1", "GPU-2"),
				{
					Namespace: "b", Pod: "q", Container: "c", Devices: []string{"GPU-0::1"},
					ByResource: map[string][]string{"nvidia.com/gpu": {"GPU-0::1"}},
				},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "a #?%20.sock")
			serve(t, &kubelettest.PodResources{Pods: c.pods, Busy: 2}, socket)
			got, err := podresources.List(t.Context(), socket)
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("holders (-want +got):\n%s", diff)
			}
		})
	}
}

// holder is a container of namespace a with devices of one resource.
func holder(pod, container, resource string, ids ...string) podresources.Holder {
	return podresources.Holder{
		Namespace: "a", Pod: pod, Container: container, Devices: ids, ByResource: map[string][]string{resource: ids},
	}
}

// The kubelet lists the devices of a resource in several entries.
func TestAllocatable(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "a.sock")
	serve(t, &kubelettest.PodResources{Allocatable: map[string][]string{
		"nvidia.com/gpu": {"GPU-1", "GPU-2", "GPU-3"}, "example.com/nic": {"eth1"},
	}}, socket)
	got, err := podresources.Allocatable(t.Context(), socket)
	testenv.Must(t, err)
	want := map[string]map[string]bool{
		"nvidia.com/gpu": {"GPU-1": true, "GPU-2": true, "GPU-3": true}, "example.com/nic": {"eth1": true},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if got, err := podresources.Allocatable(t.Context(), socket+"x"); got != nil || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the socket: %v, error %v", got, err)
	}
}

func TestListErrors(t *testing.T) {
	dir := t.TempDir()
	file, refusing := filepath.Join(dir, "file"), filepath.Join(dir, "refusing.sock")
	testenv.Must(t, os.WriteFile(file, nil, 0o600))
	serve(t, &kubelettest.PodResources{Err: status.Error(codes.ResourceExhausted, "rejected by rate limit")}, refusing)
	for name, c := range map[string]struct {
		socket, want string
		notExist     bool
	}{
		"there is no socket": {
			filepath.Join(dir, "none"), "list the pods' devices from the kubelet's socket ", true,
		},
		"the file is not a socket":    {file, "from the kubelet's socket " + file, false},
		"the kubelet does not answer": {refusing, "rejected by rate limit", false},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := podresources.List(t.Context(), c.socket)
			if list != nil || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v and the error %v, want one with %q", list, err, c.want)
			}
			if errors.Is(err, fs.ErrNotExist) != c.notExist {
				t.Errorf("%v: that the socket does not exist is %v", err, !c.notExist)
			}
		})
	}
}

func serve(t *testing.T, k *kubelettest.PodResources, socket string) {
	t.Helper()
	stop, err := k.Serve(socket)
	testenv.Must(t, err)
	t.Cleanup(stop)
}
