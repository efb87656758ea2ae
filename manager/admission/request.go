// Package admission chooses the devices of containers, as the kubelet's device manager and Topology Manager do: which
// devices are free, which of them suit the NUMA nodes that a container is to be on, and which the plugin prefers. It is
// pure: it speaks to no plugin and keeps nothing outside its values.
//
// A container is admitted in these steps. For each resource that it asks for, Pool.Hints says which NUMA nodes would
// do. Topology.Merge makes one choice of them, the container's affinity. Pool.Plan chooses devices, or says what the
// plugin is to be asked first; Plan.Pick returns the devices. Pool.Hold notes them.
package admission

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// Request is what a container asks for of one resource.
type Request struct {
	Count int
	// Reusable are the devices that the pod's init containers leave to this container. See Reuse.
	Reusable []string
	// Affinity is the NUMA nodes that the devices should be close to, from Topology.Merge. It is empty if any will do.
	Affinity Nodes
	// Prefers means that the plugin offers GetPreferredAllocation.
	Prefers bool
	// Random is the source of a random choice. The default is the order of the devices' IDs.
	Random *rand.Rand
}

// checkRequest returns why a request cannot be met before any device is chosen, in the kubelet's order and words. A
// limit of 0 is refused as well while no device is healthy.
func (p *Pool) checkRequest() error {
	switch {
	case !p.registered:
		return UnregisteredError(p.resource)
	case p.healthy.count() == 0:
		return fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", p.resource)
	}
	return nil
}

// UnregisteredError is the kubelet's rejection of a pod that asks for a resource without a plugin.
func UnregisteredError(resource string) error {
	return fmt.Errorf("cannot allocate unregistered device %s", resource)
}

// ChangedError is the kubelet's rejection of a pod that has devices and asks for another number of them.
func ChangedError(pod, container, resource string, from, to int) error {
	return fmt.Errorf("pod %q container %q changed request for resource %q from %d to %d",
		pod, container, resource, from, to)
}

// Reuse is the devices that init containers of a pod leave to the containers after them, by resource. It is kept while
// the pod's containers are admitted in their order: init containers, then containers.
type Reuse map[string]map[string]bool

// Took notes the devices that a container has of a resource. Those of an init container that ends are left to the
// containers after it; a sidecar and a container keep theirs.
func (r Reuse) Took(resource string, ids []string, ends bool) {
	if r[resource] == nil {
		r[resource] = map[string]bool{}
	}
	for _, id := range ids {
		if ends {
			r[resource][id] = true
		} else {
			delete(r[resource], id)
		}
	}
}

// Devices returns the devices of a resource that a container can reuse, sorted.
func (r Reuse) Devices(resource string) []string { return slices.Sorted(maps.Keys(r[resource])) }

// Limits returns how many devices of each resource a pod needs at most at one time: the sum over its containers and
// sidecars, or more if an init container beside the sidecars before it needs more.
func Limits(pod model.Pod) map[string]int {
	sum, sidecars, peak := map[string]int{}, map[string]int{}, map[string]int{}
	for _, c := range pod.Containers {
		for resource, n := range c.Limits {
			sum[resource] += n
		}
	}
	for _, c := range pod.InitContainers {
		for resource, n := range c.Limits {
			if c.Sidecar {
				sum[resource] += n
				sidecars[resource] += n
				n = 0
			}
			peak[resource] = max(peak[resource], n+sidecars[resource])
		}
	}
	for resource, n := range peak {
		sum[resource] = max(sum[resource], n)
	}
	return sum
}
