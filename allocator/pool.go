package allocator

import (
	"fmt"
	"slices"
)

// Device is a device of a Pool: a GPU, a MIG device, or a replica of one.
type Device struct {
	// ID is the device's name in requests.
	ID string
	// UUID is that of the GPU or MIG device. Its replicas have it in common.
	UUID string
	// Parent is the UUID of the GPU that the device is, or is a part of.
	Parent string
	// Replica is set if the device is shared with other replicas.
	Replica bool
	// Slices are the compute slices of a MIG device. 0 counts as 1.
	Slices int
	// Unusable is set if the device must not be chosen, because it is unhealthy.
	Unusable bool
}

// Pool has the devices of a resource. It is immutable.
type Pool struct {
	node    *Node
	devices []Device
	index   map[string]int // of devices, by ID
	parent  []int          // of each device: the GPU's index in the node, or noParent
	perGPU  [][]int        // the usable devices of each GPU of the node
	// shared is set if a GPU has several devices, replicas if some of them are replicas.
	shared, replicas bool
}

// noParent is the parent of an unusable device.
const noParent = -1

// NewPool prepares devices with distinct IDs, in the order of preference among equals. Devices whose parent is not in
// the node, because it could not be read, are unusable.
func NewPool(n *Node, devices []Device) *Pool {
	p := &Pool{
		node:    n,
		devices: slices.Clone(devices),
		index:   make(map[string]int, len(devices)),
		parent:  make([]int, len(devices)),
		perGPU:  make([][]int, len(n.gpus)),
	}
	for i := range p.devices {
		d := &p.devices[i]
		p.index[d.ID] = i
		p.replicas = p.replicas || d.Replica
		p.parent[i] = noParent
		if g, ok := n.index[d.Parent]; ok && !d.Unusable {
			p.parent[i] = g
			p.perGPU[g] = append(p.perGPU[g], i)
			p.shared = p.shared || len(p.perGPU[g]) > 1
		}
	}
	return p
}

// Choose answers a request. The error of a request without an answer is a *RequestError.
func (p *Pool) Choose(policy Policy, r Request) (Choice, error) {
	best, err := p.Rank(policy, r, 1)
	if err != nil {
		return Choice{}, err
	}
	return best[0], nil
}

// Rank returns the answer of Choose, followed by the next best sets by the policy's objective; for Partition, by those
// of the next best partitions. They are k in all, or as many as there are. If a GPU has several devices there is one
// answer.
func (p *Pool) Rank(policy Policy, r Request, k int) ([]Choice, error) {
	if !policy.valid() {
		return nil, fmt.Errorf("unknown allocation policy %q", policy)
	}
	q, err := p.resolve(r)
	if err != nil {
		return nil, err
	}
	if p.shared {
		return []Choice{p.chooseShared(policy, q)}, nil
	}
	found := p.node.rank(policy, p.query(q), max(k, 1))
	all := make([]Choice, len(found))
	for i, f := range found {
		all[i] = Choice{IDs: make([]string, 0, r.Size), Score: f.score, Exact: f.exact, Bound: f.bound}
		for _, g := range f.set.members() {
			all[i].IDs = append(all[i].IDs, p.devices[p.perGPU[g][0]].ID)
		}
	}
	return all, nil
}

// query returns the request by the node's GPUs, if each has one device.
func (p *Pool) query(r *resolved) query {
	q := query{size: r.size}
	for i, s := range r.state {
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

// chooseShared is Choose if GPUs have several devices.
func (p *Pool) chooseShared(policy Policy, r *resolved) Choice {
	s := p.newSharing(r)
	none := make([]int, len(p.perGPU))
	var c Choice
	switch {
	case policy == Pack && !p.replicas:
		c.Exact = s.pack()
	case policy == Spread && !p.replicas:
		c.Exact, c.Bound = s.spread(Topology, s.used, none)
	case policy == Spread:
		c.Exact, c.Bound = s.spread(Topology, none, s.used)
	case policy == Pack:
		fullestFirst := make([]int, len(s.used))
		for g := range s.used {
			fullestFirst[g] = -s.used[g]
		}
		c.Exact, c.Bound = s.spread(Topology, none, fullestFirst)
	default:
		c.Exact, c.Bound = s.spread(policy, none, none)
	}
	var gpus set
	var chosen []int
	for g, count := range s.taken {
		if count > 0 {
			gpus.add(g)
			chosen = append(chosen, p.pick(r, g, count)...)
		}
	}
	slices.Sort(chosen)
	for _, i := range chosen {
		c.IDs = append(c.IDs, p.devices[i].ID)
	}
	c.Score = p.node.scoreOf(gpus)
	return c
}

// pick returns count devices of a GPU: those that must be included, then those of which it has picked the fewest
// replicas, in order.
func (p *Pool) pick(r *resolved, g, count int) []int {
	var picked []int
	isPicked := map[int]bool{}
	times := map[string]int{} // by UUID
	pick := func(state state, atMost int) {
		for _, i := range p.perGPU[g] {
			uuid := p.devices[i].UUID
			if len(picked) == count || r.state[i] != state || isPicked[i] || times[uuid] > atMost {
				continue
			}
			picked = append(picked, i)
			isPicked[i] = true
			times[uuid]++
		}
	}
	pick(included, count)
	for round := 0; len(picked) < count; round++ {
		pick(available, round)
	}
	return picked
}
