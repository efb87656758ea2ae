package ledger

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/resource"
)

// Holding is a device that a container of the device plugin, or a ResourceClaim, holds.
type Holding struct {
	UUID string `json:"uuid"`
	// Resource is the resource of the device plugin, and Replicas how many replicas of the device the container has, or 1.
	// A claim has neither.
	Resource string `json:"resource,omitempty"`
	Replicas int    `json:"replicas,omitempty"`
	// Namespace is that of the claim and of all containers.
	Namespace string `json:"namespace,omitempty"`
	Claim     string `json:"claim,omitempty"`
	ClaimUID  string `json:"claimUID,omitempty"`
	// Containers are the container of the device plugin, or those of the claim's pods, as of the last read. There is none
	// while the kubelet does not list any yet.
	Containers []Container `json:"containers"`
	// Since is when the claim was prepared. The kubelet does not say it of a container.
	Since time.Time `json:"since,omitzero"`
	State State     `json:"state,omitempty"`
}

// Container is a container of a pod.
type Container struct {
	Pod       string `json:"pod"`
	Container string `json:"container"`
}

// State says why the kubelet does not list a container of the device plugin. It is empty if it does.
type State string

const (
	// Starting means that Allocate has just given the device.
	Starting State = "starting"
	// Ending means that the kubelet has forgotten the container, which still ends.
	Ending State = "ending"
)

// String names the holder, like "ResourceClaim default/claim-1" or "container main of pod default/train".
func (h *Holding) String() string {
	switch {
	case h.Claim != "":
		return "ResourceClaim " + h.Namespace + "/" + h.Claim
	case len(h.Containers) == 0:
		return "a container that is starting"
	}
	one := podresources.Holder{Namespace: h.Namespace, Pod: h.Containers[0].Pod, Container: h.Containers[0].Container}
	return one.String()
}

// Holdings returns who holds devices by the door of the device plugin, under any name, and by claims, as of the last
// read and of what was given since. Devices of other device plugins are left out. It is sorted.
func (l *Ledger) Holdings() []Holding {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []Holding
	add := func(n name, of *podresources.Holder, state State) {
		if uuid := resource.UUIDOf(n.id); l.uuids[uuid] {
			h := Holding{UUID: uuid, Resource: n.resource, Replicas: 1, Containers: []Container{}, State: state}
			if of != nil {
				h.Namespace, h.Containers = of.Namespace, []Container{{of.Pod, of.Container}}
			}
			list = append(list, h)
		}
	}
	for i := range l.holders {
		for r, ids := range l.holders[i].ByResource {
			ids = slices.Clone(ids)
			slices.Sort(ids)
			for _, id := range slices.Compact(ids) { // the kubelet lists a device for each of its NUMA nodes
				add(name{r, id}, &l.holders[i], "")
			}
		}
	}
	for _, g := range l.given {
		add(g.name, nil, Starting)
	}
	for _, e := range l.ending {
		add(e.name, &e.holder, Ending)
	}
	for uid, c := range l.claims {
		list = append(list, l.ofClaim(uid, c)...)
	}
	slices.SortFunc(list, compare)
	return mergeReplicas(list)
}

func (l *Ledger) ofClaim(uid string, c claim) []Holding {
	containers := []Container{}
	for _, h := range l.holders {
		if slices.ContainsFunc(h.Claims, func(k podresources.Claim) bool { return k.Name == c.name }) {
			containers = append(containers, Container{h.Pod, h.Container})
		}
	}
	namespace, claimName, _ := strings.Cut(c.name, "/")
	var list []Holding
	for _, p := range c.portions {
		list = append(list, Holding{
			UUID: p.Device.UUID, Namespace: namespace, Claim: claimName, ClaimUID: uid, Containers: containers, Since: c.since,
		})
	}
	return list
}

func compare(a, b Holding) int {
	return cmp.Or(
		cmp.Compare(a.UUID, b.UUID), cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Claim, b.Claim), cmp.Compare(a.ClaimUID, b.ClaimUID), cmp.Compare(a.State, b.State),
		slices.CompareFunc(a.Containers, b.Containers, func(a, b Container) int {
			return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
		}),
	)
}

// mergeReplicas makes one of the replicas of a device that a container holds.
func mergeReplicas(sorted []Holding) []Holding {
	var list []Holding
	for _, h := range sorted {
		if n := len(list); n > 0 && h.Claim == "" && compare(list[n-1], h) == 0 {
			list[n-1].Replicas++
		} else {
			list = append(list, h)
		}
	}
	return list
}
