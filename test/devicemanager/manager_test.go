package devicemanager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
	"gpu-cdi-plugin/test/manager/behaviour"
)

const gpuName = "nvidia.com/gpu"

// gpus returns a resource of n GPUs, the first half on NUMA node 0. Those with the given indices are unhealthy.
func gpus(n int, unhealthy ...int) []resource.Resource {
	r := resource.Resource{Name: gpuName}
	for i := range n {
		uuid := fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i)
		r.Devices = append(r.Devices, resource.Device{
			ID: uuid, UUID: uuid, Parent: uuid, Index: i, MIGIndex: resource.NoMIG, Replica: resource.NoReplica,
			NUMANode: i * 2 / n, Healthy: !slices.Contains(unhealthy, i),
		})
	}
	return []resource.Resource{r}
}

// kubelet is the part of a kubelet that the plugin sees: a device manager on a directory, with pods.
type kubelet struct {
	*Manager
	dir  string
	pods []*v1.Pod
}

func newKubelet(t *testing.T) *kubelet {
	t.Helper()
	k := &kubelet{dir: behaviour.MakeDirectory(t)}
	k.start(t)
	t.Cleanup(func() {
		if err := k.Stop(); err != nil {
			t.Error(err)
		}
	})
	return k
}

func (k *kubelet) start(t *testing.T) {
	t.Helper()
	var err error
	if k.Manager, err = Start(filepath.Join(k.dir, "kubelet.sock"), func() []*v1.Pod { return k.pods }); err != nil {
		t.Fatal(err)
	}
}

// admit admits a pod and returns the CDI devices that it gets.
func (k *kubelet) admit(t *testing.T, name string, count int64) []string {
	t.Helper()
	pod := Pod(name, gpuName, count)
	k.pods = append(k.pods, pod)
	if err := k.Admit(pod); err != nil {
		t.Fatalf("admit pod %s: %v", name, err)
	}
	return k.cdiNames(t, pod)
}

func (k *kubelet) cdiNames(t *testing.T, pod *v1.Pod) []string {
	t.Helper()
	names, err := k.CDINames(t.Context(), pod)
	testenv.Must(t, err)
	return names
}

// awaitCounts waits until the kubelet counts so many devices.
func (k *kubelet) awaitCounts(t *testing.T, capacity, allocatable int64) {
	t.Helper()
	want := Counts{capacity, allocatable}
	testenv.Eventually(t, fmt.Sprintf("the kubelet counts %+v", want), func() bool { return k.Counts(gpuName) == want })
}

// serve runs the plugin until the test ends or stop is called, without links between GPUs.
func serve(t *testing.T, k *kubelet, list []resource.Resource) (p *plugin.Plugin, stop func()) {
	t.Helper()
	return servePreferring(t, k, nil, list)
}

// withCDINames gives each device its CDI name, as the node does when it publishes them.
func withCDINames(list []resource.Resource) []resource.Resource {
	for i := range list {
		for j := range list[i].Devices {
			d := &list[i].Devices[j]
			d.Grant = &resource.Grant{CDIDevices: []string{gpuName + "=" + d.UUID}}
		}
	}
	return list
}

// servePreferring does the same with GPUs that are connected.
func servePreferring(
	t *testing.T, k *kubelet, gpus *allocator.GPUs, list []resource.Resource,
) (p *plugin.Plugin, stop func()) {
	t.Helper()
	logs := &bytes.Buffer{}
	p, err := plugin.New(plugin.Options{
		Dir:      k.dir,
		Allocate: plugin.AllocateOptions{Strategies: []resource.Strategy{resource.CDICRI}},
		Log:      slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	testenv.Must(t, errors.Join(err, p.Update(withCDINames(list), gpus)))
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("the plugin ended: %v", err)
		}
	}
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("the plugin's log:\n%s", logs)
		}
	})
	return p, stop
}

func TestCapacityStaysWhenThePluginStops(t *testing.T) {
	k := newKubelet(t)
	_, stop := serve(t, k, gpus(8))
	k.awaitCounts(t, 8, 8)
	stop()
	k.awaitCounts(t, 8, 0)
	if err := k.Admit(Pod("late", gpuName, 1)); err == nil {
		t.Error("a pod was admitted without a plugin")
	}
	serve(t, k, gpus(8))
	k.awaitCounts(t, 8, 8)
	k.admit(t, "on-time", 1)
}

func TestContainersGetDevicesOfOneNUMANode(t *testing.T) {
	k := newKubelet(t)
	serve(t, k, gpus(8))
	k.awaitCounts(t, 8, 8)
	names := append(k.admit(t, "one", 4), k.admit(t, "other", 4)...)
	var want []string
	for _, d := range gpus(8)[0].Devices {
		want = append(want, "nvidia.com/gpu="+d.UUID)
	}
	halves := [][]string{names[:4], names[4:]}
	slices.SortFunc(halves, slices.Compare)
	if diff := cmp.Diff([][]string{want[:4], want[4:]}, halves); diff != "" {
		t.Errorf("CDI devices of the two pods (-want +got):\n%s", diff)
	}
	if err := k.Admit(Pod("third", gpuName, 1)); err == nil {
		t.Error("a pod was admitted although all devices are allocated")
	}
}
