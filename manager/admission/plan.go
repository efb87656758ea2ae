package admission

import (
	"cmp"
	"fmt"
	"slices"
)

// Preference has the parameters of a GetPreferredAllocation call.
type Preference struct {
	Available, MustInclude []string
	Size                   int
}

// Plan is a choice of devices for a container. It stays valid when the pool changes.
type Plan struct {
	// Ask has the parameters of the GetPreferredAllocation call that must be made before Pick, or is nil. If that call
	// fails, the admission fails.
	Ask *Preference

	chosen []string
	rest   []string // candidates for the devices that are still needed, best first
	need   int
	sorted bool
}

// Plan chooses devices for a request, or returns an error with the kubelet's text. For a request of 0 devices, the
// plan has no devices.
func (p *Pool) Plan(r Request) (*Plan, error) {
	if err := p.checkRequest(r); err != nil {
		return nil, err
	}
	plan := &Plan{need: r.Count, sorted: r.Random == nil}
	if plan.need <= 0 {
		return plan, nil
	}
	reusable := p.reusable(r)
	if reusable.count() >= plan.need {
		p.choose(plan, r, reusable)
		return plan, nil
	}
	plan.take(p.order(r, len(p.devices), reusable))
	free := p.free(r)
	if n := free.count(); n < plan.need {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d",
			p.resource, plan.need, n)
	}
	p.choose(plan, r, free)
	return plan, nil
}

// Pick returns the devices. `preferred` is the plugin's answer to Ask, which is only advice: devices in it that are
// unknown, repeated or too many are ignored, and missing devices are chosen without it. The result is sorted unless
// the choice is random. Pick is called once.
func (plan *Plan) Pick(preferred []string) []string {
	if plan.Ask != nil && len(preferred) > 0 {
		candidates := make(map[string]bool, len(plan.rest))
		for _, id := range plan.rest {
			candidates[id] = true
		}
		for _, id := range preferred {
			if plan.need > 0 && candidates[id] {
				plan.take([]string{id})
				delete(candidates, id)
			}
		}
		plan.rest = slices.DeleteFunc(plan.rest, func(id string) bool { return !candidates[id] })
	}
	plan.take(plan.rest)
	if plan.sorted {
		slices.Sort(plan.chosen)
	}
	return plan.chosen
}

// take adds devices to the choice until no more are needed.
func (plan *Plan) take(ids []string) {
	n := min(plan.need, len(ids))
	plan.chosen = append(plan.chosen, ids[:n]...)
	plan.need -= n
}

// choose first takes the devices that the affinity requires. For the rest it plans a call of GetPreferredAllocation.
// If the plugin does not offer that, choose takes the best devices itself: those near the affinity if there are enough
// of them, and otherwise the best of all.
func (p *Pool) choose(plan *Plan, r Request, candidates bitset) {
	aligned, unaligned, none := p.split(candidates, r.Affinity)
	groups := []bitset{aligned}
	if n := aligned.count(); n <= plan.need {
		plan.take(p.order(r, n, aligned))
		groups = []bitset{unaligned, none}
	}
	left := 0
	for _, group := range groups {
		left += group.count()
	}
	if !r.Prefers || plan.need == 0 || plan.need == left { // there is no choice for the plugin to make
		plan.take(p.order(r, plan.need, groups...))
		return
	}
	plan.rest = p.order(r, left, groups...)
	plan.Ask = &Preference{
		Available:   slices.Concat(plan.chosen, plan.rest),
		MustInclude: slices.Clone(plan.chosen),
		Size:        r.Count,
	}
	if plan.sorted {
		slices.Sort(plan.Ask.Available)
		slices.Sort(plan.Ask.MustInclude)
	}
}

// split returns three groups of devices: those near the affinity, those near other NUMA nodes, and those near none. If
// there is no affinity, or no device has NUMA nodes, all devices are in the third group.
func (p *Pool) split(devices bitset, affinity Nodes) (aligned, unaligned, none bitset) {
	aligned = newBitset(len(p.devices))
	if affinity == 0 {
		return aligned, aligned, devices
	}
	for node := range (p.nodes & affinity).each {
		aligned.addAll(devices.and(p.onNode[node]))
	}
	return aligned, devices.and(p.hasNUMA).without(aligned), devices.without(p.hasNUMA)
}

// order returns at least `limit` devices of the groups, or all of them, the best first. It takes one group after the
// other. In a group it begins with the NUMA node that has the fewest devices, so that few nodes are broken up.
func (p *Pool) order(r Request, limit int, groups ...bitset) []string {
	var ids []string
	for _, group := range groups {
		switch {
		case r.Random != nil:
			first := len(ids)
			ids = p.ids(ids, group, len(p.devices))
			shuffled := ids[first:]
			r.Random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		case r.Affinity != 0:
			for _, node := range p.smallestFirst(group) {
				ids = p.ids(ids, group.and(p.onNode[node]), limit)
				group = group.without(p.onNode[node])
			}
		}
		if r.Random == nil {
			ids = p.ids(ids, group, limit)
		}
	}
	return ids
}

// smallestFirst returns the NUMA nodes ordered by how many of the devices they have.
func (p *Pool) smallestFirst(devices bitset) []int {
	var sizes [64]int
	for node := range p.nodes.each {
		sizes[node] = devices.and(p.onNode[node]).count()
	}
	nodes := p.nodes.IDs()
	slices.SortStableFunc(nodes, func(a, b int) int { return cmp.Compare(sizes[a], sizes[b]) })
	return nodes
}

// ids appends the IDs of the devices, in order, until there are `limit` of them.
func (p *Pool) ids(ids []string, devices bitset, limit int) []string {
	for i := range devices.members {
		if len(ids) >= limit {
			break
		}
		ids = append(ids, p.devices[i].ID)
	}
	return ids
}

// reusable returns the request's reusable devices that are still healthy.
func (p *Pool) reusable(r Request) bitset { return p.indices(r.Reusable).and(p.healthy) }

// free returns the devices that a request can get and no pod has.
func (p *Pool) free(r Request) bitset {
	free := p.healthy
	if r.Among != nil {
		free = p.indices(r.Among)
		if !r.Unhealthy {
			free = free.and(p.healthy)
		}
	}
	return free.without(p.busy)
}

// indices returns the set of those devices that the plugin lists with one of these IDs.
func (p *Pool) indices(ids []string) bitset {
	devices := newBitset(len(p.devices))
	for _, id := range ids {
		if i, listed := p.index(id); listed {
			devices.add(i)
		}
	}
	return devices
}
