package manager_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
)

func TestResponsesAreBounded(t *testing.T) {
	n := newNode(t)
	n.pluginWith(gpu, answers(&v1beta1.ContainerAllocateResponse{
		Envs: map[string]string{"A": strings.Repeat("a", 1<<20)},
	}), plugintest.Devices(1)...)
	_, err := n.m.Admit(t.Context(), pod("a", wants("main", gpu, 1)), model.Caller{})
	if err == nil || !strings.Contains(err.Error(), "more than the maximum of 1048576") {
		t.Error("got", err)
	}
	if len(n.free(gpu)) != 1 {
		t.Error("free are", n.free(gpu))
	}
}

func TestDevicesThatLeaveDuringAllocate(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(2)...)
	p.Behave(plugintest.Behaviour{
		Allocate: func(context.Context, []string) (*v1beta1.ContainerAllocateResponse, error) {
			p.SetDevices(plugintest.Device("gpu-0001", true))
			n.awaitCount(gpu, manager.Count{Capacity: 1, Allocatable: 1})
			return &v1beta1.ContainerAllocateResponse{}, nil
		},
	})
	request := pod("a", wants("main", gpu, 1))
	n.refuses(
		request,
		"device gpu-0000 of example.com/gpu left the list of its plugin during Allocate: try again",
		manager.ErrRetry,
	)
	if got := ids(n.admit(request), "main", gpu); len(got) != 1 || got[0] != "gpu-0001" {
		t.Error("the second attempt gets", got)
	}
}

func TestDevicesThatTurnUnhealthyDuringAllocateAreGiven(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(1)...)
	p.Behave(plugintest.Behaviour{
		Allocate: func(context.Context, []string) (*v1beta1.ContainerAllocateResponse, error) {
			p.SetDevices(plugintest.Device("gpu-0000", false))
			n.awaitCount(gpu, manager.Count{Capacity: 1, Allocatable: 0})
			return &v1beta1.ContainerAllocateResponse{}, nil
		},
	})
	n.admit(pod("a", wants("main", gpu, 1)))
}

// hangs has a plugin hang in Allocate. begun is closed when it does.
func hangs() (b plugintest.Behaviour, begun chan struct{}) {
	begun = make(chan struct{})
	begin := sync.OnceFunc(func() { close(begun) })
	return plugintest.Behaviour{
		Allocate: func(ctx context.Context, _ []string) (*v1beta1.ContainerAllocateResponse, error) {
			begin()
			return nil, plugintest.Hang(ctx)
		},
	}, begun
}

// A pod that waits for Allocate holds its own devices, and nothing else of its resources.
func TestStuckPluginsCostTheirOwnPodsOnly(t *testing.T) {
	n := newNode(t)
	b, begun := hangs()
	p := n.pluginWith(gpu, b, plugintest.Devices(2)...)
	n.plugin(nic, plugintest.Devices(2)...)
	stuck, giveUp := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() {
		both := model.Container{Name: "main", Limits: map[string]int{gpu: 1, nic: 1}}
		_, err := n.m.Admit(stuck, pod("stuck", both), model.Caller{})
		answer <- err
	}()
	<-begun
	n.admit(pod("shares-the-other-resource", wants("main", nic, 1)))
	b.Allocate = nil
	p.Behave(b)
	n.admit(pod("same-resource", wants("main", gpu, 1)))
	giveUp()
	if err := <-answer; !errors.Is(err, context.Canceled) {
		t.Error("the stuck pod got", err)
	}
	if free := n.free(gpu); len(free) != 1 {
		t.Error("afterwards free are", free)
	}
}

func TestAllocateHasADeadline(t *testing.T) {
	n := newNode(t, func(o *manager.Options) { o.Deadlines = endpoint.Deadlines{Allocate: 20 * time.Millisecond} })
	b, _ := hangs()
	n.pluginWith(gpu, b, plugintest.Devices(1)...)
	_, err := n.m.Admit(t.Context(), pod("a", wants("main", gpu, 1)), model.Caller{})
	if status.Code(errors.Unwrap(err)) != codes.DeadlineExceeded {
		t.Error("got", err)
	}
	if free := n.free(gpu); len(free) != 1 {
		t.Error("afterwards free are", free)
	}
}
