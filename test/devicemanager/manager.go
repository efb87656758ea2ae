// Package devicemanager has the tests of the device plugin against the kubelet's own device manager, in one process:
// what it counts as capacity and allocatable, what it hands to containers, and what it still knows after a restart.
package devicemanager

import (
	"context"
	"fmt"
	"slices"
	_ "unsafe" // for go:linkname

	cadvisor "github.com/google/cadvisor/info/v1"
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

// newManager is the device manager's constructor with a socket of one's own: the exported one has the kubelet's.
//
//go:linkname newManager k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManager(klog.Logger, string, []cadvisor.Node, topologymanager.Store) (*devicemanager.ManagerImpl, error)

// Manager is a device manager beside the topology manager that asks it before a pod is admitted.
type Manager struct {
	*devicemanager.ManagerImpl
	topology topologymanager.Manager
}

// Start starts a device manager on a node with two NUMA nodes, where the devices of a container have to be on one. Its
// socket is at a path, and what it knows of earlier ones beside it. The pods are those that the kubelet has.
func Start(socket string, pods func() []*v1.Pod) (*Manager, error) {
	nodes := []cadvisor.Node{{Id: 0}, {Id: 1}}
	topology, err := topologymanager.NewManager(nodes, topologymanager.PolicySingleNumaNode, "container", nil)
	if err != nil {
		return nil, fmt.Errorf("make a topology manager: %w", err)
	}
	m := &Manager{topology: topology}
	if m.ManagerImpl, err = newManager(klog.Background(), socket, nodes, topology); err != nil {
		return nil, fmt.Errorf("make a device manager: %w", err)
	}
	topology.AddHintProvider(klog.Background(), m)
	sources := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	if err := m.Start(klog.Background(), pods, sources, containermap.NewContainerMap(), sets.New[string]()); err != nil {
		return nil, fmt.Errorf("start a device manager: %w", err)
	}
	return m, nil
}

// Stop ends it, as far as it can be ended without its process: it goes on reading the lists of plugins.
func (m *Manager) Stop() error { return m.ManagerImpl.Stop(klog.Background()) }

// Admit gives a pod its devices, or says why the kubelet would not run it.
func (m *Manager) Admit(pod *v1.Pod) error {
	if res := m.topology.Admit(&lifecycle.PodAdmitAttributes{Pod: pod}); !res.Admit {
		return fmt.Errorf("%s: %s", res.Reason, res.Message)
	}
	return nil
}

// Counts are the devices of a resource that the kubelet reports of its node.
type Counts struct{ Capacity, Allocatable int64 }

// Counts asks for the counts of a resource.
func (m *Manager) Counts(name string) Counts {
	capacity, allocatable, _ := m.GetCapacity()
	c, a := capacity[v1.ResourceName(name)], allocatable[v1.ResourceName(name)]
	return Counts{c.Value(), a.Value()}
}

// CDINames are the names of the CDI devices that a pod's container is to be given.
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

// Pod is a pod with a container that asks for some of a resource.
func Pod(name, resourceName string, count int64) *v1.Pod {
	limits := v1.ResourceList{v1.ResourceName(resourceName): *resource.NewQuantity(count, resource.DecimalSI)}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)},
		Spec:       v1.PodSpec{Containers: []v1.Container{{Name: "main", Resources: v1.ResourceRequirements{Limits: limits, Requests: limits}}}},
	}
}
