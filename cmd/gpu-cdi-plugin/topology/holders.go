package topology

import (
	"fmt"
	"iter"
	"slices"
	"strings"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// DeviceHolders returns the containers that hold devices of the node, by the device plugin or by a claim. Devices that
// are not in the snapshot are left out.
func (n Node) DeviceHolders() []podresources.Holder {
	onNode, uuids := map[string]bool{}, map[string]string{}
	for uuid := range deviceNames(n.Snapshot) {
		onNode[uuid], uuids[podresources.DeviceName(uuid)] = true, uuid
	}
	list := []podresources.Holder{}
	for _, h := range n.Holders {
		h.Devices = slices.DeleteFunc(slices.Clone(h.Devices), func(id string) bool { return !onNode[resource.UUIDOf(id)] })
		for _, k := range h.Claims {
			for _, name := range k.Devices[podresources.DRADriver] {
				if uuid := uuids[name]; uuid != "" {
					h.Devices = append(h.Devices, uuid)
				}
			}
		}
		if len(h.Devices) > 0 {
			list = append(list, h)
		}
	}
	return list
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
