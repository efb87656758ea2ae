package allocator

import (
	"fmt"
	"slices"
)

// Device is a device of a Pool: a GPU, a MIG device, or a replica of one.
type Device struct {
	// ID is the device's name in requests.
	ID string
	// UUID is the UUID of the GPU or MIG device. It is the same for all replicas of a device.
	UUID string
	// Parent is the UUID of the device's GPU.
	Parent string
	// Replica is set if the device is one of several replicas.
	Replica bool
	// Slices are the compute slices of a MIG device. 0 counts as 1.
	Slices int
	// Unusable is set if the device must not be chosen because it is unhealthy.
	Unusable bool
}

// Pool has the devices of a resource. It is immutable.
type Pool struct {
	gpus    *GPUs
	devices []Device
	index   map[string]int // of devices, by ID
	parent  []int          // of each device: the index of its GPU, or noParent
	perGPU  [][]int        // the usable devices of each GPU
	// several is set if a GPU has several devices, and replicas if some devices are replicas.
	several, replicas bool
}

// noParent is the parent of an unusable device.
const noParent = -1

// NewPool prepares devices with distinct IDs. Of devices that are equally good, the earlier one is chosen. If the GPU
// of a device could not be read, the device is unusable.
func NewPool(n *GPUs, devices []Device) *Pool {
	p := &Pool{
		gpus:    n,
		devices: slices.Clone(devices),
		index:   make(map[string]int, len(devices)),
		parent:  make([]int, len(devices)),
		perGPU:  make([][]int, len(n.list)),
	}
	for i := range p.devices {
		d := &p.devices[i]
		p.index[d.ID] = i
		p.replicas = p.replicas || d.Replica
		p.parent[i] = noParent
		if g, ok := n.index[d.Parent]; ok && !d.Unusable {
			p.parent[i] = g
			p.perGPU[g] = append(p.perGPU[g], i)
			p.several = p.several || len(p.perGPU[g]) > 1
		}
	}
	return p
}

// Choose answers a request. If the request has no answer, the error is a *RequestError.
func (p *Pool) Choose(policy Policy, r Request) (Choice, error) {
	if !slices.Contains(Policies(), string(policy)) {
		return Choice{}, fmt.Errorf("unknown allocation policy %q", policy)
	}
	states, err := p.resolve(r)
	if err != nil {
		return Choice{}, err
	}
	if p.several {
		return p.chooseShared(policy, r, states), nil
	}
	x := p.gpus.search(policy, p.query(r.Size, states))
	c := Choice{IDs: make([]string, 0, r.Size), Score: p.gpus.scoreOf(x)}
	for _, g := range x.members() {
		c.IDs = append(c.IDs, p.devices[p.perGPU[g][0]].ID)
	}
	return c, nil
}

// query returns the request as a query for GPUs, if each GPU has one device.
func (p *Pool) query(size int, states []state) query {
	q := query{size: size}
	for i, s := range states {
		if s != unavailable {
			q.available.add(p.parent[i])
		}
		if s == included {
			q.must.add(p.parent[i])
		}
	}
	q.from = q.available
	return q
}
