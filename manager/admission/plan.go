package admission

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Preference are the parameters of GetPreferredAllocation.
type Preference struct {
	Available, MustInclude []string
	Size                   int
}

// Plan is a choice of devices for a container. It stays valid when the pool changes.
type Plan struct {
	// Ask is what the plugin is to be asked before Pick, or nil. An error of the plugin fails the admission.
	Ask *Preference

	chosen []string
	rest   []string // candidates for the devices that are still needed, best first
	need   int
	sorted bool
}

// Plan chooses devices for a request, or says why there are none, in the kubelet's words. A request for no devices, and
// one for devices that the container has already, gives a plan without devices.
func (p *Pool) Plan(r Request) (*Plan, error) {
	if err := p.check(r); err != nil {
		return nil, err
	}
	plan := &Plan{need: r.Count - len(r.Has), sorted: r.Random == nil}
	if plan.need == 0 {
		return plan, nil
	}
	reusable := p.reusable(r)
	if len(reusable) >= plan.need {
		if r.Dialect.ChargesInitDevices {
			plan.take(p.ids(p.shuffled(reusable, r)))
			return plan, nil
		}
		p.choose(plan, r, reusable)
		return plan, nil
	}
	plan.take(p.ids(p.shuffled(reusable, r)))
	free := p.healthy.without(p.busy)
	if n := free.count(); n < plan.need {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d",
			p.resource, plan.need, n)
	}
	p.choose(plan, r, slices.Collect(free.members))
	return plan, nil
}

// Pick returns the devices, with the plugin's answer to Ask. The answer is advice: what is unknown, repeated or too
// much is left out, and what is missing is chosen without it. The devices are sorted unless the choice is random.
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

// take moves devices into the choice until no more are needed.
func (plan *Plan) take(ids []string) {
	n := min(plan.need, len(ids))
	plan.chosen = append(plan.chosen, ids[:n]...)
	plan.need -= n
}

// choose takes the devices that the affinity leaves no choice about, and asks for a preference among the others: among
// those near the affinity if they are more than needed, otherwise among all.
func (p *Pool) choose(plan *Plan, r Request, candidates []int) {
	aligned, others := p.split(candidates, r)
	plan.rest = aligned
	if len(aligned) <= plan.need {
		plan.take(aligned)
		plan.rest = others
	}
	choice := plan.need < len(plan.rest) || r.Dialect.ChargesInitDevices // the kubelet asks about the only answer too
	if !r.Prefers || plan.need == 0 || !choice {
		return
	}
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

// split returns the devices near the affinity, and the others: those near other NUMA nodes, then those near none. In
// each group those near the NUMA node with the fewest candidates come first, so that the choice breaks up few nodes. A
// device near several nodes counts for the best one. Without an affinity all are others.
func (p *Pool) split(candidates []int, r Request) (aligned, others []string) {
	candidates = p.shuffled(candidates, r)
	if r.Affinity == 0 || !p.hasNUMA() {
		return nil, p.ids(candidates)
	}
	var perNode [64]int
	for _, i := range candidates {
		for node := range p.devices[i].near.each {
			perNode[node]++
		}
	}
	ranks := make([]rank, len(candidates))
	for n, i := range candidates {
		ranks[n] = p.devices[i].rank(r.Affinity, &perNode)
		ranks[n].device = i
	}
	slices.SortStableFunc(ranks, func(a, b rank) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.crowd, b.crowd), cmp.Compare(a.node, b.node))
	})
	for _, k := range ranks {
		if id := p.devices[k.device].ID; k.group == 0 {
			aligned = append(aligned, id)
		} else {
			others = append(others, id)
		}
	}
	return aligned, others
}

// rank is a device's place among the candidates.
type rank struct {
	group  int // 0 near the affinity, 1 near other NUMA nodes, 2 near none
	node   int // the node with the fewest candidates of those that matter
	crowd  int // the candidates near node
	device int // its index
}

func (d device) rank(affinity Nodes, perNode *[64]int) rank {
	best, nodes := rank{crowd: math.MaxInt}, d.near&affinity
	switch {
	case nodes != 0:
	case len(d.NUMA) > 0:
		best.group, nodes = 1, d.near
	default:
		best.group = 2
	}
	for node := range nodes.each {
		if perNode[node] < best.crowd {
			best.crowd, best.node = perNode[node], node
		}
	}
	return best
}

// hasNUMA returns whether any device of the resource has NUMA nodes: if none has, an affinity says nothing.
func (p *Pool) hasNUMA() bool {
	return slices.ContainsFunc(p.devices, func(d device) bool { return len(d.NUMA) > 0 })
}

// shuffled returns the candidates in the order of their IDs, or in a random one.
func (p *Pool) shuffled(candidates []int, r Request) []int {
	candidates = slices.Clone(candidates)
	if r.Random != nil {
		swap := func(i, j int) { candidates[i], candidates[j] = candidates[j], candidates[i] }
		r.Random.Shuffle(len(candidates), swap)
	}
	return candidates
}

// reusable returns the request's reusable devices that are still healthy, in the order of their IDs.
func (p *Pool) reusable(r Request) []int {
	var reusable []int
	for _, id := range r.Reusable {
		if i, listed := p.index(id); listed && p.healthy.has(i) {
			reusable = append(reusable, i)
		}
	}
	slices.Sort(reusable)
	return slices.Compact(reusable)
}

func (p *Pool) ids(indices []int) []string {
	ids := make([]string, len(indices))
	for n, i := range indices {
		ids[n] = p.devices[i].ID
	}
	return ids
}
