package resource

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// share applies the first rule of sharing that fits each device.
func (b *builder) share() {
	ways := b.config.Sharing.ways()
	for i := range b.plans {
		p := &b.plans[i]
		w, r := b.fitting(ways, p)
		if r == nil {
			continue
		}
		if err := b.shareOne(p, w, r); err != nil {
			b.problem(p.device.UUID, "is not shared: %v", err)
		}
	}
	b.reportMixed()
}

// fitting is the rule for a device, and its way. With rules of two ways there is none: neither was meant more than the
// other.
func (b *builder) fitting(ways []way, p *plan) (*way, *Replicated) {
	var fits []string
	var found *way
	var rule *Replicated
	for i := range ways {
		if n := b.rule(&ways[i], p); n >= 0 {
			fits = append(fits, item(ways[i].key, n))
			found, rule = &ways[i], &ways[i].rules[n]
		}
	}
	if len(fits) > 1 {
		b.problem(p.device.UUID, "is not shared: %s fit it, and a device is shared in one way", strings.Join(fits, " and "))
		return nil, nil
	}
	return found, rule
}

// rule is the number of the first rule that fits, or -1.
func (b *builder) rule(w *way, p *plan) int {
	for i := range w.rules {
		r := &w.rules[i]
		key := item(w.key, i)
		if r.Name != p.resource {
			continue
		}
		if len(r.Devices) == 0 || b.anyFits(key+".devices", r.Devices, p.gpu, p.mig) {
			b.used[key] = true
			return i
		}
	}
	return -1
}

// shareOne shares a device, or says why it cannot be.
func (b *builder) shareOne(p *plan, w *way, r *Replicated) error {
	if n := len(replicaID(p.device.UUID, r.Replicas-1)); n > MaxID {
		return fmt.Errorf("the IDs of %d replicas would have %d characters, and %d are allowed", r.Replicas, n, MaxID)
	}
	if w.key == mpsKey {
		limits, err := mpsLimits(p, r.Replicas, b.config.Sharing.MPS.SharedMemoryMiB)
		if err != nil {
			return err
		}
		p.device.MPS = limits
	}
	p.replicas, p.way, p.resource = r.Replicas, w, w.target(r)
	return nil
}

// reportMixed tells of resources with which a container cannot know whether it has a device for itself, or how it is
// shared.
func (b *builder) reportMixed() {
	kinds := map[string]map[string]bool{}
	for _, p := range b.plans {
		kind := ""
		if p.way != nil {
			kind = p.way.key
		}
		if kinds[p.resource] == nil {
			kinds[p.resource] = map[string]bool{}
		}
		kinds[p.resource][kind] = true
	}
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		switch k := kinds[name]; {
		case len(k) == 1:
		case k[""]:
			b.problem(name, "has devices that are shared and devices that are not; set rename for the shared ones")
		default:
			b.problem(name, "has devices that are shared by time-slicing and devices that are by MPS; set rename for one of them")
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
	for _, w := range c.Sharing.ways() {
		unused(w.key, len(w.rules))
	}
}
