package resource

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Validate reports everything that is wrong with the configuration by itself, whatever the node has. The messages name
// the key, as "sharing.time-slicing.resources[1].replicas".
func (c *Config) Validate() error {
	var p problems
	p.add("resource", CheckName(c.Resource))
	if !slices.Contains(MIGStrategies(), string(c.MIGStrategy)) {
		p.add("mig-strategy", fmt.Errorf("unknown value %q; known are %s", c.MIGStrategy, strings.Join(MIGStrategies(), ", ")))
	}
	p.addSelectors("gpus.include", c.GPUs.Include)
	p.addSelectors("gpus.exclude", c.GPUs.Exclude)
	p.addNames("resources.gpus", c.Names.GPUs)
	p.addNames("resources.mig", c.Names.MIG)
	p.addSharing(c)
	return errors.Join(p...)
}

type problems []error

func (p *problems) add(key string, err error) {
	if err != nil {
		*p = append(*p, fmt.Errorf("%s: %w", key, err))
	}
}

func (p *problems) addSelectors(key string, list []Selector) {
	for i, s := range list {
		p.add(fmt.Sprintf("%s[%d]", key, i), s.check())
	}
}

func (p *problems) addNames(key string, rules []Name) {
	for i, r := range rules {
		item := fmt.Sprintf("%s[%d]", key, i)
		if strings.TrimSpace(string(r.Pattern)) == "" {
			p.add(item+".pattern", errors.New("is empty; * fits everything"))
		}
		p.add(item+".name", CheckName(r.Name))
	}
}

func (p *problems) addSharing(c *Config) {
	ways := c.Sharing.ways()
	for i := range ways {
		p.addRules(&ways[i])
	}
	if len(c.Sharing.MPS.Resources) > 0 && !c.MPS {
		p.add(mpsKey, errors.New("needs mps: true (--mps), since MPS is experimental and runs programs of the driver"))
	}
	if n := c.Sharing.MPS.SharedMemoryMiB; n < 1 || n > MaxSharedMemoryMiB {
		p.add("sharing.mps.shared-memory-mib", fmt.Errorf("want 1 to %d, got %d", MaxSharedMemoryMiB, n))
	}
	for i, r := range c.Sharing.MPS.Resources {
		sliced := c.Sharing.TimeSlicing.Resources
		if j := slices.IndexFunc(sliced, func(t Replicated) bool { return overlap(&t, &r) }); j >= 0 {
			p.add(item(mpsKey, i), fmt.Errorf("is for devices of %s that %s is for too; a device is shared in one way",
				r.Name, item(timeSlicingKey, j)))
		}
	}
}

func (p *problems) addRules(w *way) {
	for i := range w.rules {
		r, key := &w.rules[i], item(w.key, i)
		if err := CheckName(r.Name); err != nil {
			p.add(key+".name", err)
		} else {
			p.add(key+".rename", CheckName(w.target(r)))
		}
		p.add(key+".replicas", checkReplicas(r.Replicas))
		p.addSelectors(key+".devices", r.Devices)
		if j := slices.IndexFunc(w.rules[:i], func(e Replicated) bool { return hides(&e, r) }); j >= 0 {
			p.add(key, fmt.Errorf("never holds: %s is for all devices of %s already", item(w.key, j), r.Name))
		}
	}
}

// overlap reports whether two rules are for some of the same devices, as far as their text tells it.
func overlap(a, b *Replicated) bool {
	same := func(s Selector) bool { return slices.Contains(b.Devices, s) }
	return a.Name == b.Name && (len(a.Devices) == 0 || len(b.Devices) == 0 || slices.ContainsFunc(a.Devices, same))
}

// hides reports whether a rule leaves nothing to a later one.
func hides(earlier, later *Replicated) bool {
	return earlier.Name == later.Name && len(earlier.Devices) == 0
}

func checkReplicas(n int) error {
	switch {
	case n < 2:
		return fmt.Errorf("want 2 or more, got %d", n)
	case n > maxReplicas:
		return fmt.Errorf("want at most %d, got %d: the kubelet cannot receive more devices", maxReplicas, n)
	}
	return nil
}
