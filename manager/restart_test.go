package manager_test

import (
	"errors"
	"log/slog"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestPodsStayInTheOrderOfAdmission(t *testing.T) {
	n := newNode(t)
	for _, uid := range []string{"c", "a", "b", "d"} {
		n.admit(pod(uid))
	}
	n.release("a")
	n.admit(pod("a"))
	for range 2 {
		var order []string
		for _, p := range n.m.Pods() {
			order = append(order, p.Pod.UID)
		}
		if want := []string{"c", "b", "d", "a"}; !slices.Equal(order, want) {
			t.Errorf("the order is %v, want %v", order, want)
		}
		n.restart()
	}
}

// A restart does not know the resource any more: no container has a device of it, and its plugin was away for too long.
func TestPodsWithAResourceThatIsGoneAreReleased(t *testing.T) {
	n := newNode(t, func(o *manager.Options) { o.Deadlines = endpoint.Deadlines{Grace: 50 * time.Millisecond} })
	p := n.plugin(gpu, plugintest.Devices(1)...)
	n.plugin(nic, plugintest.Devices(1)...)
	a := pod("a", wants("main", nic, 1))
	a.InitContainers = []model.Container{wants("init", gpu, 1)}
	n.admit(a)
	testenv.Must(t, n.m.Ended(t.Context(), "a", "init"))
	p.Stop()
	n.until("the resource is gone", func() bool { return n.resource(gpu).Name == "" })
	n.restart()
	n.release("a")
	if pods, held := n.m.Pods(), n.resource(nic).Devices; len(pods) > 0 || len(held) > 0 {
		t.Error("after the release placed are", pods, "and held are", held)
	}
}

// A node has rebooted, and its plugin has not come back.
func TestNewPodsNeedThePlugin(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *manager.Options) { o.Deadlines = endpoint.Deadlines{Grace: 3 * time.Second} })
	n.plugin(gpu, plugintest.Devices(1)...)
	n.restart()
	if got := n.resource(gpu); got.Name != gpu || got.Connected || got.Capacity != 0 || got.Allocatable != 0 {
		t.Errorf("the resource is %+v", got)
	}
	n.refuses(pod("a", wants("main", gpu, 1)),
		"no healthy devices present; cannot allocate unhealthy devices example.com/gpu")
	if pods := n.m.Pods(); len(pods) > 0 {
		t.Error("placed are", pods)
	}
	n.until("the resource is removed", func() bool { return n.resource(gpu).Name == "" })
	n.restart()
	if got := n.resource(gpu); got.Name != "" {
		t.Errorf("after another restart the resource is %+v", got)
	}
	n.refuses(pod("a", wants("main", gpu, 1)), "cannot allocate unregistered device example.com/gpu")
}

func TestRunningPodsAreAdmittedWithoutThePlugin(t *testing.T) {
	n := newNode(t)
	n.plugin(gpu, plugintest.Devices(1)...)
	p := pod("a", wants("main", gpu, 1))
	p.InitContainers = []model.Container{wants("init", gpu, 1)}
	n.admit(p)
	testenv.Must(t, n.m.Ended(t.Context(), "a", "init"))
	n.restart()
	n.admit(p)
}

func TestPodsWhoseDeviceIsGoneAreAdmittedAgain(t *testing.T) {
	n := newNode(t, func(o *manager.Options) {
		o.Topology = admission.Topology{Policy: admission.PolicyBestEffort, Machine: admission.NodesOf(0, 1)}
	})
	p := n.plugin(gpu, plugintest.Device("0", true, 0), plugintest.Device("1", true, 1))
	n.admit(pod("a", wants("main", gpu, 1)))
	p.SetDevices(plugintest.Device("1", true, 1))
	n.awaitCount(gpu, manager.Count{Capacity: 1, Allocatable: 1})
	n.admit(pod("a", wants("main", gpu, 1))) // before a restart
	n.restart()
	n.back(p, 1)
	n.admit(pod("a", wants("main", gpu, 1)))
}

func TestDamagedStateGivesNoDeviceTwice(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(4)...)
	n.admit(pod("a", wants("main", gpu, 1)))
	n.damage()
	n.start()
	loss := n.m.Withheld()
	if loss == nil {
		t.Fatal("nothing is withheld")
	}
	if _, err := os.Stat(loss.File); err != nil {
		t.Error("the damaged state is not kept:", err)
	}
	p.Stop()
	n.serve(p, "gpu.sock")
	n.register(p)
	n.awaitCount(gpu, manager.Count{Capacity: 4, Allocatable: 0})
	b := pod("b", wants("main", gpu, 1))
	n.refuses(b, "requested number of devices unavailable for example.com/gpu. Requested: 1, Available: 0")
	for _, ids := range [][]string{{"gpu-0002", "gpu-0004"}, {"typo"}} {
		if err := n.m.Free(t.Context(), gpu, ids); !errors.Is(err, manager.ErrNotFound) {
			t.Errorf("a release of %v, which the plugin does not list, got %v", ids, err)
		}
	}
	n.awaitCount(gpu, manager.Count{Capacity: 4, Allocatable: 0})
	testenv.Must(t, n.m.Free(t.Context(), gpu, []string{"gpu-0002"}))
	n.awaitCount(gpu, manager.Count{Capacity: 4, Allocatable: 1})
	if got := ids(n.admit(b), "main", gpu); !slices.Equal(got, []string{"gpu-0002"}) {
		t.Error("gpu-0002 was free, and the pod has", got)
	}
	n.release("b")
	n.restart()
	n.back(p, 1)
	if diff := cmp.Diff(loss, n.m.Withheld()); diff != "" {
		t.Errorf("after a restart (-before +after):\n%s", diff)
	}
	testenv.Must(t, n.m.FreeAll(t.Context()))
	n.awaitCount(gpu, manager.Count{Capacity: 4, Allocatable: 4})
	n.restart()
	if n.m.Withheld() != nil {
		t.Error("after a restart devices are withheld again")
	}
}

// IDs that no plugin lists would stay in the state, so they are refused while the plugin is disconnected.
func TestDevicesAreNotFreedWhileThePluginIsAway(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(2)...)
	n.damage()
	n.start()
	if err := n.m.Free(t.Context(), gpu, []string{"gpu-0001"}); !errors.Is(err, manager.ErrRetry) {
		t.Errorf("a release without the plugin: %v", err)
	}
	n.back(p, 0)
	testenv.Must(t, n.m.Free(t.Context(), gpu, []string{"gpu-0001"}))
	for range 2 {
		if got := ids(n.admit(pod("a", wants("main", gpu, 1))), "main", gpu); !slices.Equal(got, []string{"gpu-0001"}) {
			t.Error("gpu-0001 is free, and the pod has", got)
		}
		n.release("a")
		n.restart()
		n.back(p, 1)
	}
}

// damage ends the manager and makes its state unreadable.
func (n *node) damage() {
	n.Helper()
	n.stop()
	testenv.Must(n, n.end())
	testenv.Must(n, os.WriteFile(n.o.StateFile, make([]byte, 64<<10), 0o600))
}

// 1,000 pods hold their devices again after a restart.
func TestManyPodsAfterARestart(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(1000)...)
	n.admitMany(1000)
	start := time.Now()
	n.restart()
	t.Log("end and start with 1,000 pods:", time.Since(start))
	n.back(p, 1000)
	if free := n.free(gpu); len(free) != 0 || len(n.m.Pods()) != 1000 {
		t.Error("after a restart free are", free, "and the pods are", len(n.m.Pods()))
	}
}

// A kubelet's checkpoint has neither the names of pods nor their containers without devices.
func TestImportedPodsAreCompleted(t *testing.T) {
	entry := func(resource, env, id string) kubelet.Entry {
		response, err := proto.Marshal(&v1beta1.ContainerAllocateResponse{Envs: map[string]string{"A": env}})
		testenv.Must(t, err)
		return kubelet.Entry{
			PodUID: "a", ContainerName: "main", ResourceName: resource, AllocResp: response,
			DeviceIDs: map[int64][]string{kubelet.NoNode: {id}},
		}
	}
	file := kubelet.Checkpoint{ // in any order
		PodDeviceEntries: []kubelet.Entry{entry(nic, "nic", "gpu-0000"), entry(gpu, "gpu", "gpu-0001")},
	}
	main := func(gpus int) model.Container {
		return model.Container{Name: "main", Limits: map[string]int{gpu: gpus, nic: 1}}
	}
	n := newNode(t)
	n.stop()
	testenv.Must(t, n.end())
	store, _, err := state.Open(n.o.StateFile, slog.Default())
	testenv.Must(t, err)
	for _, p := range manager.PlacementsOf(&file) {
		testenv.Must(t, store.Put(p))
	}
	testenv.Must(t, store.Close())
	n.start()
	request := pod("a", main(1), model.Container{Name: "plain"})
	request.InitContainers = []model.Container{{Name: "init"}}
	n.refuses(pod("a", main(2)),
		`pod "a" container "main" changed request for resource "example.com/gpu" from 1 to 2`)
	n.refuses(pod("a", model.Container{Name: "plain"}), `pod "a" is placed with another name or other containers`)
	for range 2 {
		placement := n.admit(request)
		if diff := cmp.Diff(request, placement.Pod); diff != "" {
			t.Error("the pod (-request +placed):\n" + diff)
		}
		if got := ids(placement, "main", gpu); !slices.Equal(got, []string{"gpu-0001"}) {
			t.Error("the pod has", got)
		}
		n.restart()
	}
	n.plugin(gpu, plugintest.Devices(2)...)
	n.plugin(nic, plugintest.Devices(1)...)
	if got, err := n.m.Start(t.Context(), "a", "main"); err != nil || got.Envs["A"] != "gpu" {
		t.Errorf("the container gets %+v and %v", got, err)
	}
	n.refuses(pod("b", wants("main", gpu, 2)),
		"requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 1")
}
