package topology

import (
	"fmt"
	"iter"
	"slices"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// Holder is a container that holds devices.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Devices are device plugin IDs: the UUID of a GPU or MIG device, or "UUID::n" for a replica.
	Devices []string `json:"devices"`
	// ByResource has the same IDs by resource.
	ByResource map[string][]string `json:"-"`
}

// String names the container, like "container main of pod default/train".
func (h *Holder) String() string {
	return fmt.Sprintf("container %s of pod %s/%s", h.Container, h.Namespace, h.Pod)
}

// UUIDs returns the UUIDs of the devices that the container holds. If it holds several replicas of a device, the UUID
// occurs once for each.
func (h *Holder) UUIDs() []string {
	uuids := make([]string, len(h.Devices))
	for i, id := range h.Devices {
		uuids[i] = UUIDOf(id)
	}
	return uuids
}

// DeviceHolders returns the containers that hold devices of the node. Devices that are not in the snapshot are left
// out.
func (n Node) DeviceHolders() []Holder {
	onNode := map[string]bool{}
	for uuid := range deviceNames(n.Snapshot) {
		onNode[uuid] = true
	}
	list := []Holder{}
	for _, h := range n.Holders {
		h.Devices = slices.DeleteFunc(slices.Clone(h.Devices), func(id string) bool { return !onNode[UUIDOf(id)] })
		if len(h.Devices) > 0 {
			list = append(list, h)
		}
	}
	return list
}

// UUIDOf returns the UUID in a device plugin ID.
func UUIDOf(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	return uuid
}

// deviceNames yields the UUID and the name of each GPU and MIG device.
func deviceNames(s *gpu.Snapshot) iter.Seq2[string, string] {
	return func(yield func(uuid, name string) bool) {
		for i := range s.Devices {
			d := &s.Devices[i]
			if d.UUID != "" && !yield(d.UUID, fmt.Sprintf("GPU %d", d.Index)) {
				return
			}
			for _, m := range d.MIG {
				if m.UUID != "" && !yield(m.UUID, fmt.Sprintf("MIG %d:%d", d.Index, m.Index)) {
					return
				}
			}
		}
	}
}

// holder is a container that holds devices. The drawing has a letter for it.
type holder struct {
	name    string // namespace/pod/container
	pod     string
	letter  string
	devices string
}

// use is a container's use of a device. `holder` is the container's index in the list of holders.
type use struct{ holder, replicas int }

// holdersOf returns the containers that hold devices of the node, and the uses of each device by UUID.
func holdersOf(n Node) (holders []holder, uses map[string][]use) {
	uses = map[string][]use{}
	for i, h := range n.DeviceHolders() {
		replicas := map[string]int{}
		for _, uuid := range h.UUIDs() {
			replicas[uuid]++
		}
		var devices []string
		for uuid, name := range deviceNames(n.Snapshot) {
			switch count := replicas[uuid]; count {
			case 0:
				continue
			case 1:
				devices = append(devices, name)
			default:
				devices = append(devices, fmt.Sprintf("%s (%d times)", name, count))
			}
			uses[uuid] = append(uses[uuid], use{i, replicas[uuid]})
		}
		name := clean(h.Namespace + "/" + h.Pod + "/" + h.Container)
		holders = append(holders, holder{name, clean(h.Pod), letter(i), strings.Join(devices, ", ")})
	}
	return holders, uses
}

// letter returns the letter of the n-th container: A to Z, then AA, AB and so on.
func letter(n int) string {
	if n < 26 {
		return string(rune('A' + n))
	}
	return letter(n/26-1) + letter(n%26)
}

// heldBy returns the holders of a device as the end of a sentence, or "".
func (s *scene) heldBy(uuid string) string {
	var names []string
	for _, u := range s.uses[uuid] {
		names = append(names, s.holders[u.holder].name)
	}
	if len(names) == 0 {
		return ""
	}
	return ", held by " + strings.Join(names, ", ")
}
