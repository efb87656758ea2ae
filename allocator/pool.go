package allocator

import (
	"fmt"
	"slices"
)

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
	// Slices are the GPU's compute slices that a MIG device has; 0 counts as 1.
	Slices int
	// Unusable tells that it must not be chosen: it is unhealthy.
	Unusable bool
}

// Pool has the devices that can be had under one name. It does not change.
type Pool struct {
	node    *Node
	devices []Device
	place   map[string]int // of devices, by ID
	parent  []int          // of each device: the GPU's place in the node, or unusable
	perGPU  [][]int        // the places of the usable devices of each GPU of the node
	// shared tells that a GPU has several devices, replicas that some of them are replicas.
	shared, replicas bool
}

// unusable is the parent of a device that must not be chosen.
const unusable = -1

// NewPool prepares devices, in the order in which they are to be preferred among equals. Those whose parent the node
// does not have, because it could not be read, are unusable. No two have the same ID.
func NewPool(n *Node, devices []Device) *Pool {
	p := &Pool{
		node:    n,
		devices: slices.Clone(devices),
		place:   make(map[string]int, len(devices)),
		parent:  make([]int, len(devices)),
		perGPU:  make([][]int, len(n.gpus)),
	}
	for i := range p.devices {
		d := &p.devices[i]
		p.place[d.ID] = i
		p.replicas = p.replicas || d.Replica
		p.parent[i] = unusable
		if g, ok := n.byUUID[d.Parent]; ok && !d.Unusable {
			p.parent[i] = g
			p.perGPU[g] = append(p.perGPU[g], i)
			p.shared = p.shared || len(p.perGPU[g]) > 1
		}
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

// Rank returns the answer of Choose and after it the next best sets, k in all or as many as there are. Of devices of which
// a GPU has several there is one answer only.
//
// The next best are those by the policy's objective; for Partition, those of the next best partitions.
func (p *Pool) Rank(policy Policy, r Request, k int) ([]Choice, error) {
	if !policy.Valid() {
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
		for _, g := range f.set.places() {
			all[i].IDs = append(all[i].IDs, p.devices[p.perGPU[g][0]].ID)
		}
	}
	return all, nil
}

// chooseShared is Choose where GPUs have several devices.
func (p *Pool) chooseShared(policy Policy, r *resolved) Choice {
	s := p.stock(r)
	none := make([]int, len(p.perGPU))
	var c Choice
	switch {
	case policy == Pack && !p.replicas:
		c.Exact = s.packed()
	case policy == Spread && !p.replicas:
		c.Exact, c.Bound = s.even(Topology, s.used, none)
	case policy == Spread:
		c.Exact, c.Bound = s.even(Topology, none, s.used)
	case policy == Pack:
		c.Exact, c.Bound = s.even(Topology, none, negative(s.used))
	default:
		c.Exact, c.Bound = s.even(policy, none, none)
	}
	var gpus set
	var places []int
	for g, count := range s.take {
		if count > 0 {
			gpus.add(g)
			places = append(places, p.pick(r, g, count)...)
		}
	}
	slices.Sort(places)
	for _, i := range places {
		c.IDs = append(c.IDs, p.devices[i].ID)
	}
	c.Score = p.node.scoreOf(gpus)
	return c
}

func negative(values []int) []int {
	minus := make([]int, len(values))
	for i, v := range values {
		minus[i] = -v
	}
	return minus
}

// pick takes devices of a GPU: those that must be included, then those of which it has taken fewest replicas, in order.
func (p *Pool) pick(r *resolved, g, count int) []int {
	var picked []int
	times := map[string]int{} // of each UUID
	take := func(want state, atMost int) {
		for _, i := range p.perGPU[g] {
			uuid := p.devices[i].UUID
			if len(picked) == count || r.state[i] != want || times[uuid] > atMost {
				continue
			}
			picked = append(picked, i)
			r.state[i] = elsewhere
			times[uuid]++
		}
	}
	take(taken, count)
	for round := 0; len(picked) < count; round++ {
		take(available, round)
	}
	return picked
}
