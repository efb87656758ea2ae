package topology

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// pod is a pod that holds devices of the node. In the picture it has a letter.
type pod struct {
	name       string // namespace/name
	letter     string
	containers []container
}

// container is a container with the devices of the node that it holds, sorted.
type container struct {
	Holder
	devices []heldDevice
}

// heldDevice is a device, and how many replicas of it a container holds.
type heldDevice struct {
	uuid     string
	name     deviceName
	replicas int
}

// use is a pod that holds a device, by its position in the list of pods, and how many replicas it holds.
type use struct{ pod, replicas int }

// podsOf returns the pods that hold devices of the node, in the order of their first devices, and the uses of each
// device by UUID.
func podsOf(n Node) (pods []pod, uses map[string][]use) {
	names := deviceNames(n.Snapshot)
	byPod := map[[2]string][]container{}
	for _, h := range n.Holders {
		if devices := heldDevices(h, names); len(devices) > 0 {
			key := [2]string{h.Namespace, h.Pod}
			byPod[key] = append(byPod[key], container{h, devices})
		}
	}
	for _, containers := range byPod {
		slices.SortStableFunc(containers, compareContainers)
	}
	sorted := slices.SortedFunc(maps.Values(byPod), func(a, b []container) int { return compareContainers(a[0], b[0]) })
	uses = map[string][]use{}
	for i, containers := range sorted {
		name := clean(containers[0].Namespace + "/" + containers[0].Pod)
		pods = append(pods, pod{name, letter(i), containers})
		for _, c := range containers {
			for _, d := range c.devices {
				if n := len(uses[d.uuid]); n > 0 && uses[d.uuid][n-1].pod == i {
					uses[d.uuid][n-1].replicas += d.replicas
				} else {
					uses[d.uuid] = append(uses[d.uuid], use{i, d.replicas})
				}
			}
		}
	}
	return pods, uses
}

func compareContainers(a, b container) int {
	return cmp.Or(
		a.devices[0].name.compare(b.devices[0].name), cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container),
	)
}

// heldDevices returns the devices of the node that a container holds.
func heldDevices(h Holder, names map[string]deviceName) []heldDevice {
	var list []heldDevice
	for _, id := range h.Devices {
		uuid := uuidOf(id)
		name, ok := names[uuid]
		if !ok {
			continue
		}
		if i := slices.IndexFunc(list, func(d heldDevice) bool { return d.uuid == uuid }); i >= 0 {
			list[i].replicas++
		} else {
			list = append(list, heldDevice{uuid, name, 1})
		}
	}
	slices.SortStableFunc(list, func(a, b heldDevice) int { return a.name.compare(b.name) })
	return list
}

// deviceText lists a container's devices.
func (c container) deviceText() string {
	var words []string
	for _, d := range c.devices {
		word := d.name.String()
		if d.replicas > 1 {
			word += fmt.Sprintf(" (%d times)", d.replicas)
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

// deviceText lists the devices of all containers of a pod.
func (p pod) deviceText() string {
	var words []string
	for _, c := range p.containers {
		words = append(words, c.deviceText())
	}
	return strings.Join(words, ", ")
}

// letter returns the letter of the n-th pod: A to Z, then AA, AB and so on.
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
		names = append(names, s.pods[u.pod].name)
	}
	if len(names) == 0 {
		return ""
	}
	return ", held by " + strings.Join(names, ", ")
}

// deviceName is a device by index. mig is -1 for a GPU.
type deviceName struct{ gpu, mig int }

func (n deviceName) String() string {
	if n.mig < 0 {
		return "GPU " + strconv.Itoa(n.gpu)
	}
	return fmt.Sprintf("MIG %d:%d", n.gpu, n.mig)
}

func (n deviceName) compare(m deviceName) int {
	return cmp.Or(cmp.Compare(n.gpu, m.gpu), cmp.Compare(n.mig, m.mig))
}

// deviceNames returns the names of a node's devices by UUID.
func deviceNames(s *gpu.Snapshot) map[string]deviceName {
	names := map[string]deviceName{}
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.UUID != "" {
			names[d.UUID] = deviceName{d.Index, -1}
		}
		for _, m := range d.MIG {
			if m.UUID != "" {
				names[m.UUID] = deviceName{d.Index, m.Index}
			}
		}
	}
	return names
}
