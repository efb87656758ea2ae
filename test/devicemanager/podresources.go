package devicemanager

import (
	_ "unsafe" // for go:linkname

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	_ "k8s.io/kubernetes/pkg/kubelet/cm" // for containerDevices
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

// containerDevices converts devices to the type that the PodResources service returns.
//
//go:linkname containerDevices k8s.io/kubernetes/pkg/kubelet/cm.containerDevicesFromResourceDeviceInstances
func containerDevices(devicemanager.ResourceDeviceInstances) []*podresourcesv1.ContainerDevices

// GetPods returns the active pods, since no others are known.
func (k *Kubelet) GetPods() []*v1.Pod { return k.active() }

// GetActivePods returns the active pods.
func (k *Kubelet) GetActivePods() []*v1.Pod { return k.active() }

// GetPodByName returns an active pod.
func (k *Kubelet) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, p := range k.active() {
		if p.Namespace == namespace && p.Name == name {
			return p, true
		}
	}
	return nil, false
}

// podDevices provides devices to the PodResources service like the kubelet.
type podDevices struct{ *devicemanager.ManagerImpl }

// GetDevices returns the devices of a container.
func (d podDevices) GetDevices(uid, container string) []*podresourcesv1.ContainerDevices {
	return containerDevices(d.ManagerImpl.GetDevices(uid, container))
}

// GetAllocatableDevices returns the healthy devices.
func (d podDevices) GetAllocatableDevices(logger klog.Logger) []*podresourcesv1.ContainerDevices {
	return containerDevices(d.ManagerImpl.GetAllocatableDevices(logger))
}

// noResources provides no CPUs, memory or claims to the PodResources service.
type noResources struct{}

// GetCPUs returns none.
func (noResources) GetCPUs(*v1.Pod, *v1.Container) []int64 { return nil }

// GetPodCPUs returns none.
func (noResources) GetPodCPUs(string) []int64 { return nil }

// GetAllocatableCPUs returns none.
func (noResources) GetAllocatableCPUs() []int64 { return nil }

// GetMemory returns none.
func (noResources) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesv1.ContainerMemory {
	return nil
}

// GetPodMemory returns none.
func (noResources) GetPodMemory(klog.Logger, string) []*podresourcesv1.ContainerMemory { return nil }

// GetAllocatableMemory returns none.
func (noResources) GetAllocatableMemory(klog.Logger) []*podresourcesv1.ContainerMemory { return nil }

// GetDynamicResources returns none.
func (noResources) GetDynamicResources(
	klog.Logger, *v1.Pod, *v1.Container,
) []*podresourcesv1.DynamicResource {
	return nil
}
