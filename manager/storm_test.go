package manager_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
)

// owners checks that a device has one pod at a time.
type owners struct {
	mu   sync.Mutex
	pods map[string]string // by resource and device
}

// take notes what a placement has. Containers of one pod may share a device.
func (o *owners) take(p model.Placement) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, a := range p.Allocations {
		for _, id := range a.IDs {
			key := a.Resource + " " + id
			if other := o.pods[key]; other != "" && other != p.Pod.UID {
				return fmt.Errorf("%s was given to the pods %s and %s", key, other, p.Pod.UID)
			}
			o.pods[key] = p.Pod.UID
		}
	}
	return nil
}

func (o *owners) give(p model.Placement) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, a := range p.Allocations {
		for _, id := range a.IDs {
			delete(o.pods, a.Resource+" "+id)
		}
	}
}

// onFourNodes are devices on four NUMA nodes.
func onFourNodes(n int) []*v1beta1.Device {
	devices := plugintest.Devices(n)
	for i, d := range devices {
		devices[i] = plugintest.Device(d.ID, true, int64(i%4))
	}
	return devices
}

// B10: concurrent admissions are safe. While 2,000 pods come and go, devices flip.
func TestConcurrentAdmissionsAndReleases(t *testing.T) {
	n := newNode(t, func(o *manager.Options) {
		o.Topology = admission.Topology{Policy: admission.PolicyBestEffort, Machine: admission.NodesOf(0, 1, 2, 3)}
	})
	gpus, nics := onFourNodes(480), plugintest.Devices(320)
	p := n.plugin(gpu, gpus...)
	n.plugin(nic, nics...)
	given := owners{pods: map[string]string{}}
	var admitted atomic.Int64
	var pods sync.WaitGroup
	ctx := t.Context()
	for i := range 2000 {
		pods.Go(func() {
			if i%20 == 0 {
				devices := onFourNodes(480)
				devices[i%480] = plugintest.Device(devices[i%480].ID, false, 0)
				p.SetDevices(devices...)
			}
			random := rand.New(rand.NewPCG(uint64(i), 0))
			request := pod(fmt.Sprint("pod-", i), model.Container{
				Name: "main", Limits: map[string]int{gpu: 1 + random.IntN(3), nic: random.IntN(2)},
			})
			request.InitContainers = []model.Container{wants("init", gpu, 1+random.IntN(3))}
			placement, err := n.m.Admit(ctx, request, model.Caller{})
			if _, ok := errors.AsType[*manager.RejectedError](err); ok {
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			admitted.Add(1)
			if err := given.take(placement); err != nil {
				t.Error(err)
			}
			if _, err := n.m.Start(ctx, request.UID, "main"); err != nil {
				t.Error(err)
			}
			given.give(placement)
			if err := n.m.Release(ctx, request.UID); err != nil {
				t.Error(err)
			}
		})
	}
	pods.Wait()
	p.SetDevices(gpus...)
	n.awaitCount(gpu, manager.Count{Capacity: 480, Allocatable: 480})
	if len(n.free(gpu)) != 480 || len(n.free(nic)) != 320 || len(n.m.Pods()) != 0 {
		t.Error("at the end free are", n.free(gpu), n.free(nic), "and placed are", n.m.Pods())
	}
	if admitted.Load() < 100 {
		t.Error("only", admitted.Load(), "pods were admitted")
	}
	n.restart()
	if pods := n.m.Pods(); len(pods) != 0 {
		t.Error("after a restart placed are", pods)
	}
}
