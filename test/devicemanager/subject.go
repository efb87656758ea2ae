package devicemanager

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
	"unsafe"

	cadvisor "github.com/google/cadvisor/lib/model"
	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	watcherapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	podresourcesv1alpha1 "k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
	apisgrpc "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/manager/behaviour"
)

// Kubelet is the part of a kubelet that handles devices: its device manager, Topology Manager, plugin watcher and
// PodResources service, on a directory.
type Kubelet struct {
	*devicemanager.ManagerImpl

	config   behaviour.Config
	topology topologymanager.Manager
	changes  chan string
	end      func()

	mu   sync.Mutex
	pods []*v1.Pod // the active ones
}

var _ behaviour.Manager = (*Kubelet)(nil)

// NewKubelet returns a kubelet that has not been booted.
func NewKubelet(_ testing.TB, c behaviour.Config) behaviour.Manager {
	return &Kubelet{config: c, changes: make(chan string, 10_000)}
}

// Boot starts all parts.
func (k *Kubelet) Boot(b behaviour.Boot) error {
	var nodes []cadvisor.Node
	for _, id := range k.config.NUMANodes {
		nodes = append(nodes, cadvisor.Node{Id: id})
	}
	options := map[string]string{"max-allowable-numa-nodes": strconv.Itoa(max(8, len(nodes)))}
	topology, err := topologymanager.NewManager(klog.Background(), nodes, k.config.Policy, k.config.Scope, options)
	if err != nil {
		return fmt.Errorf("make a topology manager: %w", err)
	}
	socket := filepath.Join(k.config.Dir, "kubelet.sock")
	m, err := newManager(klog.Background(), socket, nodes, topology)
	if err != nil {
		return fmt.Errorf("make a device manager: %w", err)
	}
	k.ManagerImpl, k.topology = m, topology
	topology.AddHintProvider(klog.Background(), m)
	containers, running := containermap.NewContainerMap(), sets.New[string]()
	for i, c := range b.Running {
		id := fmt.Sprintf("container-%d", i)
		containers.Add(c.UID, c.Name, id)
		running.Insert(id)
	}
	sources := config.NewSourcesReady(func(sets.Set[string]) bool { return !b.NotReady })
	if err := m.Start(klog.Background(), k.active, sources, containers, running); err != nil {
		return fmt.Errorf("start a device manager: %w", err)
	}
	return k.serve(m, sources)
}

// serve starts the plugin watcher and the services beside the device manager.
func (k *Kubelet) serve(m *devicemanager.ManagerImpl, sources config.SourcesReady) error {
	if err := os.MkdirAll(filepath.Dir(k.PodResources()), 0o750); err != nil {
		return err
	}
	if err := os.RemoveAll(k.PodResources()); err != nil {
		return err
	}
	l, err := net.Listen("unix", k.PodResources())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	server := grpc.NewServer(
		apisgrpc.WithRateLimiter(ctx, "podresources", podresources.DefaultQPS, podresources.DefaultBurstTokens))
	none := noResources{}
	providers := podresources.PodResourcesProviders{
		Pods: k, Devices: podDevices{m}, Cpus: none, Memory: none, DynamicResources: none,
	}
	podresourcesv1.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(ctx, providers))
	podresourcesv1alpha1.RegisterPodResourcesListerServer(server, podresources.NewV1alpha1PodResourcesServer(providers))
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(l) })
	watcher := pluginmanager.NewPluginManager(k.config.Registry, record.NewFakeRecorder(1000))
	watcher.AddHandler(watcherapi.DevicePlugin, m.GetWatcherHandler())
	running.Go(func() { watcher.Run(ctx, sources, ctx.Done()) })
	running.Go(func() {
		for {
			select {
			case u := <-m.Updates():
				for _, uid := range u.PodUIDs {
					k.changes <- uid
				}
			case <-ctx.Done():
				return
			}
		}
	})
	k.end = func() {
		cancel()
		server.Stop()
		running.Wait()
	}
	return nil
}

// Stop stops all parts.
func (k *Kubelet) Stop() error {
	k.end()
	return k.ManagerImpl.Stop(klog.Background())
}

func (k *Kubelet) active() []*v1.Pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.pods)
}

// Admit admits a pod. From then on the pod is active.
func (k *Kubelet) Admit(ctx context.Context, p model.Pod) error {
	pod := convert(p)
	k.mu.Lock()
	if !slices.ContainsFunc(k.pods, sameUID(p.UID)) {
		k.pods = append(k.pods, pod)
	}
	k.mu.Unlock()
	attributes := &lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation}
	if res := k.topology.Admit(ctx, attributes); !res.Admit {
		k.mu.Lock()
		k.pods = slices.DeleteFunc(k.pods, sameUID(p.UID))
		k.mu.Unlock()
		return fmt.Errorf("%s: %s", res.Reason, res.Message)
	}
	return nil
}

func sameUID(uid string) func(*v1.Pod) bool {
	return func(p *v1.Pod) bool { return string(p.UID) == uid }
}

// Start returns a container's run options.
func (k *Kubelet) Start(ctx context.Context, p model.Pod, name string) (o model.RunOptions, err error) {
	pod := convert(p)
	i := slices.IndexFunc(pod.Spec.Containers, func(c v1.Container) bool { return c.Name == name })
	var container *v1.Container
	if i >= 0 {
		container = &pod.Spec.Containers[i]
	} else {
		i = slices.IndexFunc(pod.Spec.InitContainers, func(c v1.Container) bool { return c.Name == name })
		container = &pod.Spec.InitContainers[i]
	}
	options, err := k.GetDeviceRunContainerOptions(ctx, pod, container)
	if err != nil || options == nil {
		return o, err
	}
	for _, e := range options.Envs {
		if o.Envs == nil {
			o.Envs = map[string]string{}
		}
		o.Envs[e.Name] = e.Value
	}
	for _, a := range options.Annotations {
		if o.Annotations == nil {
			o.Annotations = map[string]string{}
		}
		o.Annotations[a.Name] = a.Value
	}
	for _, m := range options.Mounts {
		o.Mounts = append(o.Mounts, model.Mount{
			ContainerPath: m.ContainerPath, HostPath: m.HostPath, ReadOnly: m.ReadOnly,
		})
	}
	for _, d := range options.Devices {
		o.Devices = append(o.Devices, model.DeviceNode{
			ContainerPath: d.PathInContainer, HostPath: d.PathOnHost, Permissions: d.Permissions,
		})
	}
	for _, d := range options.CDIDevices {
		o.CDIDevices = append(o.CDIDevices, d.Name)
	}
	return o, nil
}

// Ended does nothing, since the kubelet does not tell its device manager.
func (k *Kubelet) Ended(model.Pod, string) error { return nil }

// Release makes a pod inactive.
func (k *Kubelet) Release(p model.Pod) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = slices.DeleteFunc(k.pods, sameUID(p.UID))
	return nil
}

// Counts returns the result of GetCapacity, which also removes resources.
func (k *Kubelet) Counts(name string) behaviour.Counts {
	capacity, allocatable, _ := k.GetCapacity(klog.Background())
	c, a := capacity[v1.ResourceName(name)], allocatable[v1.ResourceName(name)]
	return behaviour.Counts{Capacity: int(c.Value()), Allocatable: int(a.Value())}
}

// Devices returns the result of GetDevices.
func (k *Kubelet) Devices(p model.Pod, container string) map[string][]string {
	devices := map[string][]string{}
	for name, instances := range k.GetDevices(p.UID, container) {
		devices[name] = slices.Sorted(maps.Keys(instances))
	}
	return devices
}

// Health returns the health that the kubelet writes into the status of a pod.
func (k *Kubelet) Health(p model.Pod) map[string]map[string]string {
	pod, status := convert(p), v1.PodStatus{}
	for _, c := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, v1.ContainerStatus{Name: c.Name})
	}
	k.UpdateAllocatedResourcesStatus(klog.Background(), pod, &status)
	health := map[string]map[string]string{}
	for _, c := range status.ContainerStatuses {
		for _, r := range c.AllocatedResourcesStatus {
			for _, d := range r.Resources {
				if health[string(r.Name)] == nil {
					health[string(r.Name)] = map[string]string{}
				}
				health[string(r.Name)][string(d.ResourceID)] = string(d.Health)
			}
		}
	}
	return health
}

// HealthChanges returns the updates for which the kubelet would sync pods.
func (k *Kubelet) HealthChanges() <-chan string { return k.changes }

// PodResources returns the path of the service's socket.
func (k *Kubelet) PodResources() string {
	return filepath.Join(k.config.Dir, "pod-resources", "kubelet.sock")
}

// StateFile returns the path of the checkpoint.
func (k *Kubelet) StateFile() string {
	return filepath.Join(k.config.Dir, "kubelet_internal_checkpoint")
}

// Expire moves the times at which plugins ended into the past, because the grace period is a constant.
func (k *Kubelet) Expire() {
	endpoints := reflect.ValueOf(k.ManagerImpl).Elem().FieldByName("endpoints")
	for _, name := range endpoints.MapKeys() {
		endpoint := endpoints.MapIndex(name).FieldByName("e").Elem().Elem()
		stopped := (*time.Time)(unsafe.Pointer(endpoint.FieldByName("stopTime").UnsafeAddr()))
		if !stopped.IsZero() {
			*stopped = stopped.Add(-time.Hour)
		}
	}
}

// convert converts a pod to a v1.Pod.
func convert(p model.Pod) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace, UID: types.UID(p.UID)},
		Spec: v1.PodSpec{
			InitContainers: convertContainers(p.InitContainers), Containers: convertContainers(p.Containers),
		},
	}
}

func convertContainers(list []model.Container) (containers []v1.Container) {
	for _, c := range list {
		resources := v1.ResourceList{}
		for name, count := range c.Limits {
			resources[v1.ResourceName(name)] = *resource.NewQuantity(int64(count), resource.DecimalSI)
		}
		container := v1.Container{Name: c.Name}
		container.Resources = v1.ResourceRequirements{Limits: resources, Requests: resources}
		if c.Sidecar {
			always := v1.ContainerRestartPolicyAlways
			container.RestartPolicy = &always
		}
		containers = append(containers, container)
	}
	return containers
}
