package ledger

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/wording"
)

// Holding is a device that a container of the device plugin, or a ResourceClaim, holds.
type Holding struct {
	UUID string `json:"uuid"`
	// GPU is the UUID of the GPU of the device, or empty if it is unknown: then nobody gets a GPU of the node.
	GPU string `json:"gpu,omitempty"`
	// Resource is the resource of the device plugin, and Replicas how many replicas of the device the container has, or 1.
	// A claim has neither.
	Resource string `json:"resource,omitempty"`
	Replicas int    `json:"replicas,omitempty"`
	// Namespace is that of the claim and of all containers, or empty if it is unknown.
	Namespace string `json:"namespace,omitempty"`
	Claim     string `json:"claim,omitempty"`
	ClaimUID  string `json:"claimUID,omitempty"`
	// AdminAccess says that the claim only observes the device.
	AdminAccess bool `json:"adminAccess,omitempty"`
	// PodUID is that of the container's pod, or empty if it is unknown.
	PodUID string `json:"podUID,omitempty"`
	// Containers are the container of the device plugin, or those of the claim's pods that have the device, as of the last
	// read. There is none while the kubelet does not list any yet.
	Containers []Container `json:"containers"`
	// Since is when the claim was prepared. The kubelet does not say it of a container.
	Since time.Time `json:"since,omitzero"`
	State State     `json:"state,omitempty"`
	Book  Book      `json:"book"`
	// Forget is what "claims forget" takes, or empty.
	Forget string `json:"forget,omitempty"`
}

// Container is a container of a pod. The name of the pod may be unknown.
type Container struct {
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container"`
}

// State says what is special about a holder. It is empty for one that the kubelet has as active.
type State string

const (
	// Starting means that Allocate has just given the device.
	Starting State = "starting"
	// Ending means that the kubelet has no active pod that has the device, and the holder still ends.
	Ending State = "ending"
	// Forgotten means that an administrator has had the holder forgotten: it keeps the device from nobody.
	Forgotten State = "forgotten"
)

// Book is where a holder is known from.
type Book string

// The books.
const (
	Checkpoint   Book = "kubelet_internal_checkpoint"
	ClaimsState  Book = "dra_manager_state"
	PodResources Book = "PodResources"
	Record       Book = "record"
	Allocated    Book = "Allocate"
)

// String names the holder, like "ResourceClaim default/claim-1" or "container main of pod default/train".
func (h *Holding) String() string {
	switch {
	case h.Claim != "":
		return "ResourceClaim " + h.Namespace + "/" + h.Claim
	case len(h.Containers) == 0:
		return "a container that is starting"
	}
	return containerOf(h.Containers[0].Container, podName{h.Namespace, h.Containers[0].Pod}, h.PodUID)
}

// containerOf names a container. The name of its pod may be unknown.
func containerOf(container string, pod podName, uid string) string {
	if pod == (podName{}) {
		return fmt.Sprintf("container %s of the pod with the UID %s", container, uid)
	}
	one := podresources.Holder{Namespace: pod.namespace, Pod: pod.pod, Container: container}
	return one.String()
}

// String names the holder.
func (h *holder) String() string {
	switch {
	case h.claim != "":
		return "ResourceClaim " + h.claim
	case h.container == "":
		return "a container that is starting"
	}
	return containerOf(h.container, h.pod, h.podUID)
}

// shortID is more than the length of the IDs of known plugins.
const shortID = 80

// why says which device the holder has.
func (h *holder) why() string {
	text := h.String()
	if h.state == Ending {
		text += ", which is ending,"
	}
	text += " holds it"
	if id := cmp.Or(h.id, h.uuid); h.parent == "" {
		text = fmt.Sprintf("%s holds %q", h.String(), wording.Shorten(id, shortID))
		if h.claim != "" && len(h.pods) > 0 {
			text += " for the pod with the UID " + strings.Join(h.pods, ", ")
		}
	} else {
		text += " as " + id
	}
	if h.resource != "" {
		text += " of " + h.resource
	}
	if h.parent == "" {
		text += ", and it is unknown on which GPU that is"
	}
	return text
}

// Holdings returns who holds devices by the door of the device plugin, under any name, and by claims. Devices of other
// device plugins are left out. It is sorted.
func (l *Ledger) Holdings() []Holding {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := []Holding{}
	for _, h := range l.current() {
		one := Holding{
			UUID: h.uuid, GPU: h.parent, Resource: h.resource, Namespace: h.pod.namespace, ClaimUID: h.claimUID,
			AdminAccess: h.admin, PodUID: h.podUID, Containers: []Container{}, Since: h.since, State: h.state, Book: h.book,
		}
		switch {
		case h.claim != "":
			one.Namespace, one.Claim, _ = strings.Cut(h.claim, "/")
			one.Containers = l.containersOf(h)
			if h.claimUID != "" {
				one.Forget = claimPath(h.claimUID, podresources.DeviceName(h.uuid))
			}
		case h.container != "":
			one.Containers = []Container{{h.pod.pod, h.container}}
			fallthrough
		default:
			one.Replicas = 1
			if h.book == Checkpoint {
				one.Forget = key{h.podUID, h.container, h.name}.path()
			}
		}
		if _, here := l.books.devices[h.parent]; here || h.parent == "" || h.claim != "" {
			list = append(list, one)
		}
	}
	slices.SortFunc(list, compare)
	return mergeReplicas(list)
}

// containersOf returns the containers that have a device by a claim, as PodResources lists them.
func (l *Ledger) containersOf(h *holder) []Container {
	list := []Container{}
	for i := range l.books.listed {
		c := &l.books.listed[i]
		for _, k := range c.Claims {
			if k.Name == h.claim && slices.Contains(k.Devices[l.books.driver], podresources.DeviceName(h.uuid)) {
				list = append(list, Container{c.Pod, c.Container})
			}
		}
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
		cmp.Compare(a.PodUID, b.PodUID),
	)
}

// mergeReplicas makes one of the replicas of a device that a container holds.
func mergeReplicas(sorted []Holding) []Holding {
	list := []Holding{}
	for _, h := range sorted {
		if n := len(list); n > 0 && h.Claim == "" && compare(list[n-1], h) == 0 {
			list[n-1].Replicas++
		} else {
			list = append(list, h)
		}
	}
	return list
}
