package manager_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestPodsGetDevices(t *testing.T) {
	n := newNode(t)
	n.plugin(gpu, plugintest.Devices(4)...)
	n.plugin(nic, plugintest.Device("nic-0", true, 0, 1))
	p := pod("a", model.Container{Name: "main", Limits: map[string]int{gpu: 2, nic: 1}}, wants("other", gpu, 1))
	placement, err := n.m.Admit(t.Context(), p, model.Caller{UID: 7})
	testenv.Must(t, err)
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
	n.awaitCount(gpu, manager.Count{Capacity: 4, Allocatable: 4})
	n.release("a")
	if free := n.free(gpu); len(free) != 4 {
		t.Error("after the release free are", free)
	}
	if err := n.m.Release(t.Context(), "a"); !errors.Is(err, manager.ErrNotFound) {
		t.Error("a second release:", err)
	}
}

func TestNothingOfAnUnknownResourceIsAccepted(t *testing.T) {
	n := newNode(t)
	if p := n.admit(pod("a", wants("main", "example.com/license", 0))); len(p.Allocations) > 0 {
		t.Error("the pod has", p.Allocations)
	}
}

// Like the kubelet, the manager counts the pods that run, whether they have devices or not.
func TestPodsOverTheLimitAreRefused(t *testing.T) {
	n := newNode(t, func(o *manager.Options) { o.MaxPods = 2 })
	plugin := n.plugin(gpu, plugintest.Devices(8)...)
	n.admit(pod("a", wants("main", gpu, 1)))
	n.admit(pod("b", model.Container{Name: "main"}))
	full := "OutOfpods: Node didn't have enough resource: pods, requested: 1, used: 2, capacity: 2"
	refused := func(uid string) {
		t.Helper()
		_, err := n.m.Admit(t.Context(), pod(uid, wants("main", gpu, 1)), model.Caller{})
		if rejection, ok := errors.AsType[*manager.RejectedError](err); !ok || rejection.Error() != full {
			t.Errorf("pod %s: %v, want %s", uid, err, full)
		}
	}
	refused("c")
	n.admit(pod("a", wants("main", gpu, 1))) // is placed already
	if calls := plugin.Calls().Allocate; calls != 1 {
		t.Error("Allocate was called", calls, "times")
	}
	testenv.Must(t, n.m.Ended(t.Context(), "a", "main"))
	n.admit(pod("c", wants("main", gpu, 1)))
	refused("d")
	n.restart()
	n.back(plugin, 8)
	refused("d")
	n.release("b")
	_, err := n.m.Admit(t.Context(), pod("d", wants("main", gpu, 9)), model.Caller{})
	if err == nil {
		t.Fatal("a pod got more devices than there are")
	}
	n.admit(pod("e")) // a pod that was refused does not count
	refused("f")
}

func TestPodsThatAreAdmittedAtOnceDoNotPassTheLimit(t *testing.T) {
	const limit, pods = 8, 32
	n := newNode(t, func(o *manager.Options) { o.MaxPods = limit })
	var admissions sync.WaitGroup
	var admitted atomic.Int32
	for i := range pods {
		admissions.Go(func() {
			if _, err := n.m.Admit(t.Context(), pod(fmt.Sprint(i)), model.Caller{}); err == nil {
				admitted.Add(1)
			}
		})
	}
	admissions.Wait()
	if got := admitted.Load(); got != limit || len(n.m.Pods()) != limit {
		t.Errorf("%d pods were admitted and %d are placed, want %d", got, len(n.m.Pods()), limit)
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
		testenv.Must(t, n.m.Ended(t.Context(), "a", "init"))
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

// No device plugin can offer a resource of Kubernetes' own, so a kubelet counts none of it.
func TestAResourceOfKubernetesOwnIsRejected(t *testing.T) {
	n := newNode(t)
	const old = "alpha.kubernetes.io/nvidia-gpu"
	_, err := n.m.Admit(t.Context(), pod("a", wants("main", old, 2)), model.Caller{})
	rejected, ok := errors.AsType[*manager.RejectedError](err)
	if !ok || rejected.Reason != "OutOf"+old ||
		rejected.Message != "Node didn't have enough resource: "+old+", requested: 2, used: 0, capacity: 0" {
		t.Errorf("the pod is answered with %v", err)
	}
	if pods := n.m.Pods(); len(pods) > 0 {
		t.Error("placed are", pods)
	}
}
