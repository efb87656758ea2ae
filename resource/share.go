package resource

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// share applies the first matching sharing rule to each device.
func (b *builder) share() {
	methods := b.config.Sharing.methods()
	for i := range b.plans {
		p := &b.plans[i]
		m, r := b.sharingRule(methods, p)
		if r == nil {
			continue
		}
		if err := b.shareOne(p, m, r); err != nil {
			b.problem(p.device.UUID, "is not shared: %v", err)
		}
	}
	b.reportMixed()
}

// sharingRule returns the rule for a device, and the method to which the rule belongs. If rules of two methods match,
// it returns none, since neither method has precedence.
func (b *builder) sharingRule(methods []method, p *plan) (*method, *SharingRule) {
	var matching []string
	var found *method
	var rule *SharingRule
	for i := range methods {
		if n := b.firstMatch(&methods[i], p); n >= 0 {
			matching = append(matching, item(methods[i].key, n))
			found, rule = &methods[i], &methods[i].rules[n]
		}
	}
	if len(matching) > 1 {
		b.problem(p.device.UUID, "is not shared: both %s match it", strings.Join(matching, " and "))
		return nil, nil
	}
	return found, rule
}

// firstMatch returns the index of the first rule that matches, or -1.
func (b *builder) firstMatch(m *method, p *plan) int {
	for i := range m.rules {
		r := &m.rules[i]
		key := item(m.key, i)
		if r.Name != p.resource {
			continue
		}
		if len(r.Devices) == 0 || b.anyMatches(key+".devices", r.Devices, p.gpu, p.mig) {
			b.used[key] = true
			return i
		}
	}
	return -1
}

// shareOne creates the replicas of a device, or returns why the device cannot be shared.
func (b *builder) shareOne(p *plan, m *method, r *SharingRule) error {
	if n := len(replicaID(p.device.UUID, r.Replicas-1)); n > maxID {
		return fmt.Errorf("the IDs of %d replicas would have %d characters, more than %d", r.Replicas, n, maxID)
	}
	if m.key == mpsKey {
		limits, err := mpsLimits(p, r.Replicas)
		if err != nil {
			return err
		}
		p.device.MPS = limits
	}
	p.replicas, p.method, p.resource = r.Replicas, m, m.target(r)
	return nil
}

// reportMixed reports resources whose devices are not all shared in the same way: it would be chance which kind a
// container gets.
func (b *builder) reportMixed() {
	kinds := map[string]map[string]bool{}
	for _, p := range b.plans {
		kind := ""
		if p.method != nil {
			kind = p.method.key
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
			b.problem(name, "has devices shared by time-slicing and devices shared by MPS; set rename for one of them")
		}
	}
}

// requireUniform makes all devices unhealthy if they differ and the strategy is MIGSingle, since a request for a GPU
// must always mean the same. They can differ while a node is repartitioned.
func (b *builder) requireUniform() {
	if b.config.MIGStrategy != MIGSingle {
		return
	}
	kinds := map[string]bool{}
	for _, p := range b.plans {
		if p.gpu.Usable() { // the MIG mode of other GPUs is unknown
			kinds[kindOf(&p)] = true
		}
	}
	if len(kinds) < 2 {
		return
	}
	names := strings.Join(slices.Sorted(maps.Keys(kinds)), ", ")
	for i := range b.plans {
		d := &b.plans[i].device
		d.Healthy = false
		d.Reason = cmp.Or(d.Reason, "mig-strategy single needs the same profile on all GPUs, but there are: "+names)
	}
	b.problem("mig-strategy", "single needs the same profile on all GPUs, but there are: %s; "+
		"partition them alike, or use mixed", names)
}

func kindOf(p *plan) string {
	if p.mig == nil {
		return "whole GPUs"
	}
	return p.mig.Profile
}

// reportUnused reports the rules and selectors that match no device. They may be meant for other nodes.
func (b *builder) reportUnused() {
	const text = "matches nothing on this node"
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
	for _, m := range c.Sharing.methods() {
		unused(m.key, len(m.rules))
	}
}
