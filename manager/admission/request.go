// Package admission chooses the devices of containers, as the kubelet's device manager and Topology Manager do: it
// knows which devices are free, which of them suit the NUMA nodes of a container, and which the plugin prefers. It is
// pure: it calls no plugin and has no state besides its values.
//
// A container is admitted in these steps. For each resource that the container requests, Pool.Hints returns the sets
// of NUMA nodes on which the request can be met. Topology.Merge combines these into the container's affinity.
// Pool.Plan chooses devices, or returns the parameters for the plugin's GetPreferredAllocation. Plan.Pick returns the
// devices, and Pool.Hold records them.
package admission

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// Request is a container's request for devices of one resource.
type Request struct {
	Count int
	// Reusable are the devices that this container can take over from the pod's init containers. See Reuse.
	Reusable []string
	// Among are the devices that may be chosen. If it is nil, all may.
	Among []string
	// Unhealthy means that devices of Among may be chosen that are not healthy.
	Unhealthy bool
	// Affinity is the set of NUMA nodes near which the devices should be, from Topology.Merge. Empty means any.
	Affinity Nodes
	// Prefers means that the plugin offers GetPreferredAllocation.
	Prefers bool
	// Random is the source of a random choice. If it is nil, devices are chosen in the order of their IDs.
	Random *rand.Rand
}

// checkRequest returns the kubelet's error if a request can be refused before devices are chosen. Like the kubelet it
// first checks that some device is healthy: otherwise it refuses even a limit of 0.
func (p *Pool) checkRequest(r Request) error {
	switch {
	case !p.registered:
		return UnregisteredError(p.resource)
	case p.healthy.count() == 0 && (!r.Unhealthy || !p.connected):
		return fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", p.resource)
	}
	return nil
}

// UnregisteredError returns the kubelet's rejection of a pod that requests a resource which no plugin has registered.
func UnregisteredError(resource string) error {
	return fmt.Errorf("cannot allocate unregistered device %s", resource)
}

// ChangedError returns the kubelet's rejection of a pod that has devices and now requests another number of them.
func ChangedError(pod, container, resource string, from, to int) error {
	return fmt.Errorf("pod %q container %q changed request for resource %q from %d to %d",
		pod, container, resource, from, to)
}

// Reuse has, by resource, the devices that a pod's init containers leave to later containers. It is used while the
// pod's containers are admitted, first the init containers, then the others.
type Reuse map[string]map[string]bool

// Took records that a container has these devices of a resource. If the container ends before the next ones start
// (`ends`), they can reuse its devices; sidecars and the pod's other containers keep theirs.
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

// Devices returns the devices of a resource that the next container can reuse, sorted.
func (r Reuse) Devices(resource string) []string { return slices.Sorted(maps.Keys(r[resource])) }

// Limits returns how many devices of each resource a pod needs at most at one time. That is the sum over its
// containers and sidecars, or more if an init container and the sidecars that start before it need more.
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
