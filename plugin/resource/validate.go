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
	p.addTimeSlicing("sharing.time-slicing.resources", &c.Sharing.TimeSlicing)
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

func (p *problems) addTimeSlicing(key string, t *TimeSlicing) {
	for i := range t.Resources {
		r := &t.Resources[i]
		item := fmt.Sprintf("%s[%d]", key, i)
		if err := CheckName(r.Name); err != nil {
			p.add(item+".name", err)
		} else {
			p.add(item+".rename", CheckName(t.target(r)))
		}
		p.add(item+".replicas", checkReplicas(r.Replicas))
		p.addSelectors(item+".devices", r.Devices)
		if j := slices.IndexFunc(t.Resources[:i], func(e Replicated) bool { return hides(&e, r) }); j >= 0 {
			p.add(item, fmt.Errorf("never holds: %s[%d] is for all devices of %s already", key, j, r.Name))
		}
	}
}

// hides reports whether a rule leaves nothing to a later one.
func hides(earlier, later *Replicated) bool {
	return earlier.Name == later.Name && len(earlier.Devices) == 0
}

func checkReplicas(n int) error {
	switch {
	case n < 2:
		return fmt.Errorf("is %d, want 2 or more", n)
	case n > maxReplicas:
		return fmt.Errorf("is %d; with more than %d the kubelet could not read the list of even one GPU's replicas", n, maxReplicas)
	}
	return nil
}
