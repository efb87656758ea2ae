package manager

import (
	"slices"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/manager/model"
)

// NewCheckpoint returns a kubelet's checkpoint with these placements. `registered` has the IDs of the healthy devices
// by resource.
func NewCheckpoint(placements []model.Placement, registered map[string][]string) *kubelet.Checkpoint {
	c := &kubelet.Checkpoint{RegisteredDevices: make(map[string][]string, len(registered))}
	for name, ids := range registered {
		c.RegisteredDevices[name] = append([]string{}, ids...) // the kubelet writes [], never null
	}
	for _, p := range placements {
		for _, a := range p.Allocations {
			c.PodDeviceEntries = append(c.PodDeviceEntries, kubelet.Entry{
				PodUID: p.Pod.UID, ContainerName: a.Container, ResourceName: a.Resource,
				DeviceIDs: byNode(a), AllocResp: append([]byte{}, a.Response...),
			})
		}
	}
	return c
}

func byNode(a model.Allocation) map[int64][]string {
	nodes := map[int64][]string{}
	for _, id := range a.IDs {
		if len(a.NUMA[id]) == 0 {
			nodes[kubelet.NoNode] = append(nodes[kubelet.NoNode], id)
		}
		for _, node := range a.NUMA[id] {
			nodes[int64(node)] = append(nodes[int64(node)], id)
		}
	}
	return nodes
}

// PlacementsOf returns the entries of a kubelet's checkpoint by pod, in the order of the first entry of each pod. Of a
// pod only the UID and the containers that have devices are known; the limits of a container are the numbers of its
// devices. If two entries are for the same container and resource, the last one counts, as for the kubelet.
func PlacementsOf(c *kubelet.Checkpoint) []model.Placement {
	var placements []model.Placement
	pods := map[string]int{} // indices in placements, by UID
	for _, e := range c.PodDeviceEntries {
		i, found := pods[e.PodUID]
		if !found {
			i = len(placements)
			pods[e.PodUID] = i
			placements = append(placements, model.Placement{Pod: model.Pod{UID: e.PodUID}})
		}
		addAllocation(&placements[i], allocationOf(e))
	}
	return placements
}

func allocationOf(e kubelet.Entry) model.Allocation {
	a := model.Allocation{Container: e.ContainerName, Resource: e.ResourceName, Response: e.AllocResp}
	for node, ids := range e.DeviceIDs {
		a.IDs = append(a.IDs, ids...)
		for _, id := range ids {
			if node == kubelet.NoNode {
				continue
			}
			if a.NUMA == nil {
				a.NUMA = map[string][]int{}
			}
			a.NUMA[id] = append(a.NUMA[id], int(node))
		}
	}
	slices.Sort(a.IDs)
	a.IDs = slices.Compact(a.IDs)
	for id, nodes := range a.NUMA {
		slices.Sort(nodes)
		a.NUMA[id] = slices.Compact(nodes)
	}
	return a
}

// addAllocation adds an allocation to a placement, with its container.
func addAllocation(p *model.Placement, a model.Allocation) {
	i := slices.IndexFunc(p.Allocations, func(other model.Allocation) bool {
		return other.Container == a.Container && other.Resource == a.Resource
	})
	if i >= 0 {
		p.Allocations[i] = a
	} else {
		p.Allocations = append(p.Allocations, a)
	}
	i = slices.IndexFunc(p.Pod.Containers, func(c model.Container) bool { return c.Name == a.Container })
	if i < 0 {
		i = len(p.Pod.Containers)
		p.Pod.Containers = append(p.Pod.Containers, model.Container{Name: a.Container, Limits: map[string]int{}})
	}
	p.Pod.Containers[i].Limits[a.Resource] = len(a.IDs)
}
