package manager_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
)

func TestPodsGetDevices(t *testing.T) {
	n := newNode(t)
	n.plugin(gpu, plugintest.Devices(4)...)
	n.plugin(nic, plugintest.Device("nic-0", true, 0, 1))
	p := pod("a", model.Container{Name: "main", Limits: map[string]int{gpu: 2, nic: 1}}, wants("other", gpu, 1))
	placement, err := n.m.Admit(t.Context(), p, model.Caller{UID: 7})
	if err != nil {
		t.Fatal(err)
	}
	for i := range placement.Allocations {
		if len(placement.Allocations[i].Response) == 0 {
			t.Errorf("allocation %d has no response", i)
		}
		placement.Allocations[i].Response = nil
	}
	want := []model.Allocation{
		{Container: "main", Resource: gpu, IDs: []string{"gpu-0000", "gpu-0001"}},
		{Container: "main", Resource: nic, IDs: []string{"nic-0"}, NUMA: map[string][]int{"nic-0": {0, 1}}},
		{Container: "other", Resource: gpu, IDs: []string{"gpu-0002"}},
	}
	if diff := cmp.Diff(want, placement.Allocations); diff != "" {
		t.Error("allocations (-want +got):\n" + diff)
	}
	if placement.Caller.UID != 7 || placement.Admitted.IsZero() {
		t.Error("the placement has the caller", placement.Caller, "and the time", placement.Admitted)
	}
	if free := n.free(gpu); !slices.Equal(free, []string{"gpu-0003"}) {
		t.Error("free are", free)
	}
	n.counts(gpu, 4, 4)
	n.release("a")
	if free := n.free(gpu); len(free) != 4 {
		t.Error("after the release free are", free)
	}
	if err := n.m.Release(t.Context(), "a"); !errors.Is(err, manager.ErrNotFound) {
		t.Error("a second release:", err)
	}
}

func TestPodsAreRejected(t *testing.T) {
	for name, test := range map[string]struct {
		devices []*v1beta1.Device
		pod     model.Pod
		want    string
	}{
		"because too few devices are left": {
			devices: plugintest.Devices(1),
			pod:     pod("a", wants("main", gpu, 1), wants("other", gpu, 1)),
			want:    "requested number of devices unavailable for example.com/gpu. Requested: 1, Available: 0",
		},
		"because no plugin has registered the resource": {
			devices: plugintest.Devices(1),
			pod:     pod("a", wants("main", gpu, 1), wants("other", "example.com/fpga", 1)),
			want:    "cannot allocate unregistered device example.com/fpga",
		},
		"because no device is healthy": {
			devices: []*v1beta1.Device{plugintest.Device("gpu-0", false)},
			pod:     pod("a", wants("main", gpu, 1)),
			want:    "no healthy devices present; cannot allocate unhealthy devices example.com/gpu",
		},
		"because no device is healthy, also with a limit of 0": {
			devices: []*v1beta1.Device{plugintest.Device("gpu-0", false)},
			pod:     pod("a", wants("main", gpu, 0)),
			want:    "no healthy devices present; cannot allocate unhealthy devices example.com/gpu",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.plugin(gpu, test.devices...)
			before := n.free(gpu)
			n.refuses(test.pod, test.want)
			if free := n.free(gpu); !slices.Equal(free, before) {
				t.Errorf("free were %v, and are %v after the rejection", before, free)
			}
			if pods := n.m.Pods(); len(pods) > 0 {
				t.Error("placed are", pods)
			}
		})
	}
}

func TestNothingOfAnUnknownResourceIsAccepted(t *testing.T) {
	n := newNode(t)
	if p := n.admit(pod("a", wants("main", "example.com/license", 0))); len(p.Allocations) > 0 {
		t.Error("the pod has", p.Allocations)
	}
}

func TestInvalidPods(t *testing.T) {
	n := newNode(t)
	for name, p := range map[string]model.Pod{
		"without a UID":               {Containers: []model.Container{{Name: "main"}}},
		"with two equal names":        pod("a", model.Container{Name: "main"}, model.Container{Name: "main"}),
		"with a container of no name": pod("a", model.Container{}),
		"with a negative limit":       pod("a", wants("main", gpu, -1)),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := n.m.Admit(t.Context(), p, model.Caller{}); !errors.Is(err, manager.ErrInvalid) {
				t.Error("got", err)
			}
		})
	}
}

func TestPlacedPodsAreAdmittedAgain(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(4)...)
	first := n.admit(pod("a", wants("main", gpu, 2)))
	if diff := cmp.Diff(first, n.admit(pod("a", wants("main", gpu, 2)))); diff != "" {
		t.Error("the second answer differs (-first +second):\n" + diff)
	}
	if calls := p.Calls().Allocate; calls != 1 {
		t.Error("Allocate was called", calls, "times")
	}
	n.refuses(pod("a", wants("main", gpu, 1)),
		`pod "a" container "main" changed request for resource "example.com/gpu" from 2 to 1`, manager.ErrConflict)
	n.refuses(pod("a", wants("main", gpu, 2), wants("more", gpu, 1)),
		`pod "a" is placed with another name or other containers`, manager.ErrConflict)
	if have, ok := n.m.Pod("a"); !ok || !cmp.Equal(have, first) {
		t.Error("after that the pod has", have)
	}
}

func TestInitContainersLeaveTheirDevices(t *testing.T) {
	n := newNode(t)
	n.plugin(gpu, plugintest.Devices(8)...)
	p := pod("a", wants("main", gpu, 2), wants("other", gpu, 2))
	p.InitContainers = []model.Container{wants("first", gpu, 1), wants("second", gpu, 4)}
	placement := n.admit(p)
	first, second := ids(placement, "first", gpu), ids(placement, "second", gpu)
	main, other := ids(placement, "main", gpu), ids(placement, "other", gpu)
	if !subset(first, second) || !subset(main, second) || !subset(other, second) {
		t.Errorf("the devices of init containers %v %v are not reused by %v and %v", first, second, main, other)
	}
	if subset(main, other) {
		t.Errorf("%v and %v share devices", main, other)
	}
	if free := n.free(gpu); len(free) != 4 {
		t.Error("free are", free)
	}
}

func TestSidecarsKeepTheirDevices(t *testing.T) {
	n := newNode(t)
	n.plugin(gpu, plugintest.Devices(8)...)
	sidecar := wants("sidecar", gpu, 1)
	sidecar.Sidecar = true
	p := pod("a", wants("main", gpu, 2))
	p.InitContainers = []model.Container{wants("init", gpu, 2), sidecar}
	placement := n.admit(p)
	init, side, main := ids(placement, "init", gpu), ids(placement, "sidecar", gpu), ids(placement, "main", gpu)
	if !subset(side, init) {
		t.Errorf("the sidecar has %v, and not of the init container's %v", side, init)
	}
	if subset(side, main) {
		t.Errorf("the sidecar and the container share %v", side)
	}
}

func TestEndedInitContainersGiveDevicesBack(t *testing.T) {
	n := newNode(t)
	plugin := n.plugin(gpu, plugintest.Devices(8)...)
	p := pod("a", wants("main", gpu, 2))
	p.InitContainers = []model.Container{wants("init", gpu, 4)}
	n.admit(p)
	if free := n.free(gpu); len(free) != 4 {
		t.Fatal("while the init container runs, free are", free)
	}
	for range 2 {
		if err := n.m.Ended(t.Context(), "a", "init"); err != nil {
			t.Fatal(err)
		}
	}
	if free := n.free(gpu); len(free) != 6 {
		t.Error("free are", free)
	}
	n.restart()
	n.back(plugin, 8)
	if free := n.free(gpu); len(free) != 6 {
		t.Error("after a restart free are", free)
	}
	if _, err := n.m.Start(t.Context(), "a", "init"); !errors.Is(err, manager.ErrConflict) {
		t.Error("the ended container starts again:", err)
	}
	if err := n.m.Ended(t.Context(), "a", "nothing"); !errors.Is(err, manager.ErrNotFound) {
		t.Error("an unknown container ends:", err)
	}
	n.release("a")
	if free := n.free(gpu); len(free) != 8 {
		t.Error("after the release free are", free)
	}
}

func TestPreferenceIsAskedForReusedDevices(t *testing.T) {
	n := newNode(t)
	p := n.pluginWith(gpu, plugintest.Behaviour{
		Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
		Preferred: func(_ context.Context, r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
			last := slices.Sorted(slices.Values(r.AvailableDeviceIDs))
			return last[len(last)-int(r.AllocationSize):], nil
		},
	}, plugintest.Devices(3)...)
	request := pod("a", wants("main", gpu, 1))
	request.InitContainers = []model.Container{wants("init", gpu, 3)}
	placement := n.admit(request)
	if got := ids(placement, "main", gpu); !slices.Equal(got, []string{"gpu-0002"}) {
		t.Errorf("the container has %v (calls: %+v)", got, p.Calls())
	}
}

func TestPreferenceGetsItsParameters(t *testing.T) {
	n := newNode(t)
	var asked *v1beta1.ContainerPreferredAllocationRequest
	n.pluginWith(gpu, plugintest.Behaviour{
		Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
		Preferred: func(_ context.Context, r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
			asked = r
			return []string{"gpu-0003", "gpu-0003", "bogus"}, nil
		},
	}, plugintest.Devices(4)...)
	placement := n.admit(pod("a", wants("main", gpu, 2)))
	if got, want := ids(placement, "main", gpu), []string{"gpu-0000", "gpu-0003"}; !slices.Equal(got, want) {
		t.Errorf("the container has %v, want %v", got, want)
	}
	if len(asked.AvailableDeviceIDs) != 4 || len(asked.MustIncludeDeviceIDs) != 0 || asked.AllocationSize != 2 {
		t.Error("the plugin was asked", asked)
	}
}

func TestSeedMakesTheChoiceRandomAndRepeatable(t *testing.T) {
	choices := map[string]bool{}
	for _, seed := range []uint64{1, 2, 3, 1, 2, 3} {
		n := newNode(t, func(o *manager.Options) { o.Seed = &seed })
		var asked []string // in the order of the request, as plugins meet it in a kubelet
		n.pluginWith(gpu, plugintest.Behaviour{
			Allocate: func(_ context.Context, ids []string) (*v1beta1.ContainerAllocateResponse, error) {
				asked = ids
				return &v1beta1.ContainerAllocateResponse{}, nil
			},
		}, plugintest.Devices(16)...)
		if got := ids(n.admit(pod("a", wants("main", gpu, 16))), "main", gpu); !slices.IsSorted(got) {
			t.Error("the placement has", got)
		}
		choices[strings.Join(asked, " ")] = true
	}
	if len(choices) != 3 {
		t.Error("three seeds made the choices", choices)
	}
}

func TestOnePodIsAdmittedOnceByConcurrentRequests(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(8)...)
	var requests sync.WaitGroup
	for range 8 {
		requests.Go(func() {
			placement, err := n.m.Admit(t.Context(), pod("a", wants("main", gpu, 1)), model.Caller{})
			if got := ids(placement, "main", gpu); err != nil || !slices.Equal(got, []string{"gpu-0000"}) {
				t.Errorf("got %v and %v", got, err)
			}
		})
	}
	requests.Wait()
	if calls := p.Calls().Allocate; calls != 1 {
		t.Error("Allocate was called", calls, "times")
	}
}

// As in the kubelet's own test: a pod is released while the plugin is asked for its preference.
func TestPodsAreReleasedWhileThePluginIsAsked(t *testing.T) {
	n := newNode(t)
	first := true
	n.pluginWith(gpu, plugintest.Behaviour{
		Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
		Preferred: func(_ context.Context, r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
			if !first {
				n.release("other")
			}
			first = false
			return r.AvailableDeviceIDs, nil
		},
	}, plugintest.Devices(3)...)
	n.admit(pod("other", wants("main", gpu, 1)))
	n.admit(pod("a", wants("main", gpu, 1)))
	if free := n.free(gpu); !slices.Equal(free, []string{"gpu-0000", "gpu-0002"}) {
		t.Error("free are", free)
	}
}
