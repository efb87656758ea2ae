// Package devicemanager tests the device plugin against the kubelet's own device manager, in one process: the capacity
// and allocatable counts, the devices that containers get, and the state after a restart.
package devicemanager

import (
	"context"
	"fmt"
	"slices"
	_ "unsafe" // for go:linkname

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// newManager is the device manager's constructor with a parameter for the socket. The exported constructor uses the
// kubelet's socket.
//
//go:linkname newManager k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManager(klog.Logger, string, []cadvisor.Node, topologymanager.Store) (*devicemanager.ManagerImpl, error)

// Manager is a device manager, with the topology manager that calls it to admit a pod.
type Manager struct {
	*devicemanager.ManagerImpl
	topology topologymanager.Manager
}

// Start starts a device manager on a node with two NUMA nodes. The policy requires that a container's devices are on
// one of them. The state is in the socket's directory. The function pods returns the kubelet's pods.
func Start(socket string, pods func() []*v1.Pod) (*Manager, error) {
	nodes := []cadvisor.Node{{Id: 0}, {Id: 1}}
	topology, err := topologymanager.NewManager(
		klog.Background(), nodes, topologymanager.PolicySingleNumaNode, "container", nil)
	if err != nil {
		return nil, fmt.Errorf("make a topology manager: %w", err)
	}
	m := &Manager{topology: topology}
	if m.ManagerImpl, err = newManager(klog.Background(), socket, nodes, topology); err != nil {
		return nil, fmt.Errorf("make a device manager: %w", err)
	}
	topology.AddHintProvider(klog.Background(), m)
	sources := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	containers := containermap.NewContainerMap()
	if err := m.Start(klog.Background(), pods, sources, containers, sets.New[string]()); err != nil {
		return nil, fmt.Errorf("start a device manager: %w", err)
	}
	return m, nil
}

// Stop stops the device manager, except its ListAndWatch streams, which end with the process.
func (m *Manager) Stop() error { return m.ManagerImpl.Stop(klog.Background()) }

// Admit allocates a pod's devices. An error says why the kubelet would not run the pod.
func (m *Manager) Admit(pod *v1.Pod) error {
	attributes := &lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation}
	if res := m.topology.Admit(context.Background(), attributes); !res.Admit {
		return fmt.Errorf("%s: %s", res.Reason, res.Message)
	}
	return nil
}

// Counts are the numbers of a resource's devices that the kubelet reports.
type Counts struct{ Capacity, Allocatable int64 }

// Counts returns the counts of a resource.
func (m *Manager) Counts(name string) Counts {
	capacity, allocatable, _ := m.GetCapacity(klog.Background())
	c, a := capacity[v1.ResourceName(name)], allocatable[v1.ResourceName(name)]
	return Counts{c.Value(), a.Value()}
}

// CDINames returns the names of the CDI devices that a pod's container gets, sorted.
func (m *Manager) CDINames(ctx context.Context, pod *v1.Pod) (names []string, err error) {
	options, err := m.GetDeviceRunContainerOptions(ctx, pod, &pod.Spec.Containers[0])
	if err != nil || options == nil {
		return nil, err
	}
	for _, d := range options.CDIDevices {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names, nil
}

// Pod returns a pod with a container that requests count devices of a resource.
func Pod(name, resourceName string, count int64) *v1.Pod {
	limits := v1.ResourceList{v1.ResourceName(resourceName): *resource.NewQuantity(count, resource.DecimalSI)}
	container := v1.Container{Name: "main", Resources: v1.ResourceRequirements{Limits: limits, Requests: limits}}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)},
		Spec:       v1.PodSpec{Containers: []v1.Container{container}},
	}
}
