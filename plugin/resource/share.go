package resource

import (
	"maps"
	"slices"
	"strings"
)

// share applies the first rule of sharing that fits each device.
func (b *builder) share() {
	t := &b.config.Sharing.TimeSlicing
	for i := range b.plans {
		p := &b.plans[i]
		r := b.rule(t, p)
		if r == nil {
			continue
		}
		if n := len(replicaID(p.device.UUID, r.Replicas-1)); n > MaxID {
			b.problem(p.device.UUID, "is not shared: the IDs of %d replicas would have %d characters, and %d are allowed", r.Replicas, n, MaxID)
			continue
		}
		p.replicas, p.limited, p.resource = r.Replicas, t.FailRequestsGreaterThanOne, t.target(r)
	}
	b.reportMixed()
}

func (b *builder) rule(t *TimeSlicing, p *plan) *Replicated {
	for i := range t.Resources {
		r := &t.Resources[i]
		key := item("sharing.time-slicing.resources", i)
		if r.Name != p.resource {
			continue
		}
		if len(r.Devices) == 0 || b.anyFits(key+".devices", r.Devices, p.gpu, p.mig) {
			b.used[key] = true
			return r
		}
	}
	return nil
}

// reportMixed tells of resources with which a container cannot know whether it has a device for itself.
func (b *builder) reportMixed() {
	shared, own := map[string]bool{}, map[string]bool{}
	for _, p := range b.plans {
		if p.replicas > 0 {
			shared[p.resource] = true
		} else {
			own[p.resource] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(shared)) {
		if own[name] {
			b.problem(name, "has devices that are shared and devices that are not; set rename for the shared ones")
		}
	}
}

// requireUniform holds the strategy single to its word: who asks for a GPU must know what comes. The devices stay in the
// list while the node is being partitioned anew, and nobody gets one.
func (b *builder) requireUniform() {
	if b.config.MIGStrategy != MIGSingle {
		return
	}
	kinds := map[string]bool{}
	for _, p := range b.plans {
		if p.gpu.Usable() { // what cannot be read says nothing about the others
			kinds[kindOf(&p)] = true
		}
	}
	if len(kinds) < 2 {
		return
	}
	names := strings.Join(slices.Sorted(maps.Keys(kinds)), ", ")
	for i := range b.plans {
		b.plans[i].device.fail("with the MIG strategy single all must be alike, and there are: " + names)
	}
	b.problem("mig-strategy", "single needs the same profile on all GPUs, and there are: %s; make them alike, or use mixed", names)
}

func kindOf(p *plan) string {
	if p.mig == nil {
		return "whole GPUs"
	}
	return p.mig.Profile
}

// reportUnused tells which parts of the configuration mean nothing on this node. They may be meant for other nodes.
func (b *builder) reportUnused() {
	const text = "fits nothing on this node"
	unused := func(key string, n int) {
		for i := range n {
			if !b.used[item(key, i)] {
				b.note(item(key, i), text)
			}
		}
	}
	c := b.config
	unused("gpus.include", len(c.GPUs.Include))
	unused("gpus.exclude", len(c.GPUs.Exclude))
	unused("resources.gpus", len(c.Names.GPUs))
	unused("resources.mig", len(c.Names.MIG))
	unused("sharing.time-slicing.resources", len(c.Sharing.TimeSlicing.Resources))
}
