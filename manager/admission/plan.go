package admission

import (
	"cmp"
	"fmt"
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
	ordered := p.shuffled(candidates, r)
	if r.Affinity == 0 || !p.hasNUMA() {
		return nil, p.ids(ordered)
	}
	var perNode [64]int
	for _, i := range candidates {
		for node := range p.devices[i].near.each {
			perNode[node]++
		}
	}
	type rank struct{ group, candidates, node int }
	rankOf := func(i int) rank {
		d := p.devices[i]
		best, near := rank{}, d.near&r.Affinity
		switch {
		case near != 0:
		case len(d.NUMA) > 0:
			best.group, near = 1, d.near
		default:
			best.group = 2
		}
		best.candidates = len(candidates) + 1
		for node := range near.each {
			if perNode[node] < best.candidates {
				best.candidates, best.node = perNode[node], node
			}
		}
		return best
	}
	ranks := make(map[int]rank, len(ordered))
	count := 0
	for _, i := range ordered {
		ranks[i] = rankOf(i)
		if ranks[i].group == 0 {
			count++
		}
	}
	slices.SortStableFunc(ordered, func(a, b int) int {
		x, y := ranks[a], ranks[b]
		return cmp.Or(cmp.Compare(x.group, y.group), cmp.Compare(x.candidates, y.candidates), cmp.Compare(x.node, y.node))
	})
	ids := p.ids(ordered)
	return ids[:count:count], ids[count:]
}

// hasNUMA returns whether any device of the resource has NUMA nodes: if none has, an affinity says nothing.
func (p *Pool) hasNUMA() bool {
	return slices.ContainsFunc(p.devices, func(d device) bool { return len(d.NUMA) > 0 })
}

// shuffled returns the candidates in the order of their IDs, or in a random one.
func (p *Pool) shuffled(candidates []int, r Request) []int {
	candidates = slices.Clone(candidates)
	if r.Random != nil {
		r.Random.Shuffle(len(candidates), func(i, j int) { candidates[i], candidates[j] = candidates[j], candidates[i] })
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
