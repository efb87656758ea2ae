package allocator

import "fmt"

// Device is what a Pool gives out: a GPU, a MIG device, or a replica of one.
type Device struct {
	// ID is its name in requests.
	ID string
	// UUID is that of the GPU or MIG device itself; replicas of one have it in common.
	UUID string
	// Parent is the UUID of the GPU that it is, or is a part of.
	Parent string
	// Replica tells that it is shared with other replicas.
	Replica bool
	// Unusable tells that it must not be chosen: it is unhealthy.
	Unusable bool
}

// Pool has the devices that can be had under one name. It does not change.
type Pool struct {
	node    *Node
	devices []Device
	place   map[string]int // of devices, by ID
	parent  []int          // of each device: the GPU's place in the node, or unusable
	// perGPU has the places of the devices of each GPU of the node, in order.
	perGPU [][]int
	// shared tells that some GPU has several devices, replicas that some of them are replicas.
	shared, replicas bool
}

// unusable is the parent of a device that must not be chosen.
const unusable = -1

// NewPool prepares devices, in the order in which they are to be preferred among equals. Those whose parent the node
// does not have, because it could not be read, are unusable. Of two devices with the same ID the last counts.
func NewPool(n *Node, devices []Device) *Pool {
	p := &Pool{
		node:    n,
		devices: devices,
		place:   make(map[string]int, len(devices)),
		parent:  make([]int, len(devices)),
		perGPU:  make([][]int, len(n.gpus)),
	}
	for i := range devices {
		d := &devices[i]
		p.place[d.ID] = i
		p.parent[i] = unusable
		g, ok := n.byUUID[d.Parent]
		if !ok {
			continue
		}
		if !d.Unusable {
			p.parent[i] = g
		}
		p.shared = p.shared || len(p.perGPU[g]) > 0
		p.perGPU[g] = append(p.perGPU[g], i)
		p.replicas = p.replicas || d.Replica
	}
	return p
}

// wholePool offers the GPUs themselves.
func (n *Node) wholePool() *Pool {
	devices := make([]Device, len(n.gpus))
	for i := range n.gpus {
		uuid := n.gpus[i].UUID
		devices[i] = Device{ID: uuid, UUID: uuid, Parent: uuid}
	}
	return NewPool(n, devices)
}

// Choose answers a request. A request that cannot be fulfilled is a *RequestError.
func (p *Pool) Choose(policy Policy, r Request) (Choice, error) {
	best, err := p.Rank(policy, r, 1)
	if err != nil {
		return Choice{}, err
	}
	return best[0], nil
}

// Rank returns the answer of Choose and after it the next best sets by the policy's objective, k in all or as many as
// there are.
func (p *Pool) Rank(policy Policy, r Request, k int) ([]Choice, error) {
	if !policy.Valid() {
		return nil, fmt.Errorf("unknown allocation policy %q", policy)
	}
	q, err := p.resolve(r)
	if err != nil {
		return nil, err
	}
	var all []Choice
	for _, f := range p.node.rank(policy, q, max(k, 1)) {
		all = append(all, p.choice(f))
	}
	return all, nil
}

// choice names the devices of a set of GPUs.
func (p *Pool) choice(f found) Choice {
	c := Choice{Score: f.score, Exact: f.exact, Bound: f.bound}
	for _, g := range f.set.places() {
		c.IDs = append(c.IDs, p.devices[p.perGPU[g][0]].ID)
	}
	return c
}
