package admission

import (
	"slices"
	"strings"

	"gpu-cdi-plugin/manager/model"
)

// Pool has the devices of one resource, and the containers that hold them. Containers of one pod can share a device.
// Holds are kept by device ID: a device that is no longer in the plugin's list stays held.
//
// A Pool is not safe for concurrent use.
type Pool struct {
	resource   string
	registered bool
	connected  bool
	devices    []model.Device // sorted by ID, as the plugin lists them
	near       []Nodes        // the NUMA nodes of each device
	nodes      Nodes          // the NUMA nodes with devices
	hasNUMA    bitset         // the devices with NUMA nodes; like in the other sets, a member is an index in devices
	onNode     [64]bitset
	healthy    bitset
	busy       bitset // the devices that are held or withheld
	holds      map[string][]holder
	cleared    map[string]bool // the IDs that are not withheld, or nil while nothing is withheld
}

type holder struct{ pod, container string }

// State is the state of a device in a pool.
type State struct {
	// Device is the device as the plugin lists it. If the plugin no longer lists the device, it has only its ID. While
	// the plugin is not connected, no device is healthy.
	model.Device
	// Pod is the UID of the pod that holds the device, or empty. Containers are its containers that share the device.
	Pod        string
	Containers []string
	// Withheld means that no pod gets the device until an administrator clears it.
	Withheld bool
}

// NewPool returns the pool of a resource that no plugin has registered yet.
func NewPool(resource string) *Pool {
	return &Pool{resource: resource, holds: map[string][]holder{}}
}

// Set sets the resource to what its plugin lists now. It keeps the slice of devices, which the caller must not modify.
// While the plugin is not connected, no device is healthy.
func (p *Pool) Set(r model.Resource) {
	n := len(r.Devices)
	p.registered, p.connected, p.devices = true, r.Connected, r.Devices
	p.near, p.nodes, p.onNode = make([]Nodes, n), 0, [64]bitset{}
	p.hasNUMA, p.healthy, p.busy = newBitset(n), newBitset(n), newBitset(n)
	for i, d := range r.Devices {
		p.near[i] = NodesOf(d.NUMA...)
		if d.Healthy && r.Connected {
			p.healthy.add(i)
		}
		if len(d.NUMA) > 0 {
			p.hasNUMA.add(i)
		}
		for node := range p.near[i].each {
			if p.onNode[node] == nil {
				p.onNode[node] = newBitset(n)
			}
			p.onNode[node].add(i)
		}
		p.nodes |= p.near[i]
	}
	p.refresh()
}

// Expire forgets the plugin and its devices, after the grace period. Pods keep holding the devices.
func (p *Pool) Expire() {
	p.Set(model.Resource{Name: p.resource})
	p.registered = false
}

// Registered reports whether a plugin has registered the resource since the pool was made or Expire was called.
func (p *Pool) Registered() bool { return p.registered }

// Listed returns the resource as its plugin lists it.
func (p *Pool) Listed() model.Resource {
	return model.Resource{Name: p.resource, Devices: p.devices, Connected: p.connected}
}

// Device returns a device as the plugin lists it, or nil. The caller must not modify it.
func (p *Pool) Device(id string) *model.Device {
	if i, listed := p.index(id); listed {
		return &p.devices[i]
	}
	return nil
}

// Lists reports whether the plugin lists a device.
func (p *Pool) Lists(id string) bool { return p.Device(id) != nil }

// Counts returns the number of devices that the plugin lists, and the number of those that are healthy and not
// withheld. Both include devices that pods hold, like in the status of a Node.
func (p *Pool) Counts() (capacity, allocatable int) {
	allocatable = p.healthy.count()
	if p.cleared == nil {
		return len(p.devices), allocatable
	}
	for i, d := range p.devices {
		if p.withheld(d.ID) && p.healthy.has(i) {
			allocatable--
		}
	}
	return len(p.devices), allocatable
}

// Held returns the number of devices that pods hold.
func (p *Pool) Held() int { return len(p.holds) }

// Holder returns the UID of the pod that holds a device, and the names of the containers that share it.
func (p *Pool) Holder(id string) (pod string, containers []string) {
	for _, h := range p.holds[id] {
		if pod == "" || pod == h.pod {
			pod, containers = h.pod, append(containers, h.container)
		}
	}
	return pod, containers
}

// Hold records that a pod's container has these devices.
func (p *Pool) Hold(pod, container string, ids []string) {
	for _, id := range ids {
		if h := (holder{pod, container}); !slices.Contains(p.holds[id], h) {
			p.holds[id] = append(p.holds[id], h)
		}
		p.refreshID(id)
	}
}

// Release records that a container of a pod no longer has these devices. If no other container holds a device, it
// becomes free, unless it is withheld.
func (p *Pool) Release(pod, container string, ids []string) {
	for _, id := range ids {
		i := slices.Index(p.holds[id], holder{pod, container})
		if i < 0 {
			continue
		}
		if p.holds[id] = slices.Delete(p.holds[id], i, i+1); len(p.holds[id]) > 0 {
			continue
		}
		delete(p.holds, id)
		p.refreshID(id)
	}
}

// Withhold keeps pods from getting devices until these are cleared. It applies to all devices except those in
// `cleared`, also to devices that the plugin lists later. A held device is withheld once it is released.
func (p *Pool) Withhold(cleared []string) {
	p.cleared = map[string]bool{}
	for _, id := range cleared {
		p.cleared[id] = true
	}
	p.refresh()
}

// Clear makes withheld devices available again. Devices that are not withheld stay as they are.
func (p *Pool) Clear(ids []string) {
	if p.cleared == nil {
		return
	}
	for _, id := range ids {
		p.cleared[id] = true
		p.refreshID(id)
	}
}

// ClearAll makes all withheld devices available again. Devices that the plugin lists later are not withheld any more.
func (p *Pool) ClearAll() {
	p.cleared = nil
	p.refresh()
}

// States returns the devices that the plugin lists and those that pods hold, sorted by ID.
func (p *Pool) States() []State {
	states := make([]State, 0, len(p.devices))
	for i, d := range p.devices {
		d.Healthy = p.healthy.has(i)
		states = append(states, State{Device: d, Withheld: p.withheld(d.ID)})
	}
	for id := range p.holds {
		if !p.Lists(id) {
			states = append(states, State{Device: model.Device{ID: id}})
		}
	}
	for i := range states {
		states[i].Pod, states[i].Containers = p.Holder(states[i].ID)
	}
	slices.SortFunc(states, func(a, b State) int { return strings.Compare(a.ID, b.ID) })
	return states
}

// NUMA returns the NUMA nodes of the devices by ID. Devices without NUMA nodes are left out.
func (p *Pool) NUMA(ids []string) map[string][]int {
	nodes := map[string][]int{}
	for _, id := range ids {
		if i, listed := p.index(id); listed && len(p.devices[i].NUMA) > 0 {
			nodes[id] = slices.Clone(p.devices[i].NUMA)
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	return nodes
}

func (p *Pool) index(id string) (int, bool) {
	return slices.BinarySearchFunc(p.devices, id, func(d model.Device, id string) int {
		return strings.Compare(d.ID, id)
	})
}

func (p *Pool) withheld(id string) bool {
	if p.cleared == nil || p.cleared[id] {
		return false
	}
	_, held := p.holds[id]
	return !held
}

// refresh computes which devices are busy.
func (p *Pool) refresh() {
	clear(p.busy)
	if p.cleared == nil {
		for id := range p.holds {
			p.refreshID(id)
		}
		return
	}
	for i, d := range p.devices {
		p.setBusy(i, d.ID)
	}
}

func (p *Pool) refreshID(id string) {
	if i, listed := p.index(id); listed {
		p.setBusy(i, id)
	}
}

func (p *Pool) setBusy(i int, id string) {
	if _, held := p.holds[id]; held || p.withheld(id) {
		p.busy.add(i)
	} else {
		p.busy.remove(i)
	}
}
