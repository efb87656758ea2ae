package podresources

import (
	"slices"

	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpu-cdi-plugin/manager/model"
)

// podOf converts a pod with its sidecars and containers. Like the kubelet it leaves out other init containers.
func podOf(p model.Placement) *v1.PodResources {
	pod := &v1.PodResources{Name: p.Pod.Name, Namespace: p.Pod.Namespace}
	for _, c := range p.Pod.InitContainers {
		if c.Sidecar {
			pod.Containers = append(pod.Containers, containerOf(p, c.Name))
		}
	}
	for _, c := range p.Pod.Containers {
		pod.Containers = append(pod.Containers, containerOf(p, c.Name))
	}
	return pod
}

// containerOf converts a container with its devices. If the container has ended, it has none: other pods can have
// them.
func containerOf(p model.Placement, name string) *v1.ContainerResources {
	container := &v1.ContainerResources{Name: name}
	if slices.Contains(p.Ended, name) {
		return container
	}
	for _, a := range p.Allocations {
		if a.Container != name {
			continue
		}
		for _, id := range a.IDs {
			container.Devices = append(container.Devices, devicesOf(a.Resource, id, a.NUMA[id])...)
		}
	}
	return container
}

// devicesOf returns an entry for each NUMA node of a device, like the kubelet.
func devicesOf(resource, id string, numa []int) []*v1.ContainerDevices {
	if len(numa) == 0 {
		return []*v1.ContainerDevices{{ResourceName: resource, DeviceIds: []string{id}}}
	}
	var devices []*v1.ContainerDevices
	for _, node := range numa {
		devices = append(devices, &v1.ContainerDevices{
			ResourceName: resource, DeviceIds: []string{id},
			Topology: &v1.TopologyInfo{Nodes: []*v1.NUMANode{{ID: int64(node)}}},
		})
	}
	return devices
}
