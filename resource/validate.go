package resource

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/kubelet"
)

// Validate returns all problems of the configuration that can be found without the node's devices. Each message begins
// with the key, such as "sharing.time-slicing.resources[1].replicas".
func (c *Config) Validate() error {
	var p problems
	p.add("resource", kubelet.CheckResourceName(c.Resource))
	if !slices.Contains(MIGStrategies(), string(c.MIGStrategy)) {
		known := strings.Join(MIGStrategies(), ", ")
		p.add("mig-strategy", fmt.Errorf("unknown value %q; known are %s", c.MIGStrategy, known))
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
		p.add(fmt.Sprintf("%s[%d]", key, i), s.Validate())
	}
}

func (p *problems) addNames(key string, rules []NameRule) {
	for i, r := range rules {
		item := fmt.Sprintf("%s[%d]", key, i)
		if strings.TrimSpace(string(r.Pattern)) == "" {
			p.add(item+".pattern", errors.New("is empty; * matches everything"))
		}
		p.add(item+".name", kubelet.CheckResourceName(r.Name))
	}
}

func (p *problems) addSharing(c *Config) {
	methods := c.Sharing.methods()
	for i := range methods {
		p.addRules(&methods[i])
	}
	if len(c.Sharing.MPS.Resources) > 0 && !c.MPS {
		p.add(mpsKey, errors.New("requires mps: true, since MPS is experimental and runs programs of the driver"))
	}
	for i, r := range c.Sharing.MPS.Resources {
		sliced := c.Sharing.TimeSlicing.Resources
		if j := slices.IndexFunc(sliced, func(t SharingRule) bool { return overlap(&t, &r) }); j >= 0 {
			p.add(item(mpsKey, i), fmt.Errorf("%s matches the same devices of %s; "+
				"only one method can share a device", item(timeSlicingKey, j), r.Name))
		}
	}
}

func (p *problems) addRules(m *method) {
	for i := range m.rules {
		r, key := &m.rules[i], item(m.key, i)
		if err := kubelet.CheckResourceName(r.Name); err != nil {
			p.add(key+".name", err)
		} else {
			p.add(key+".rename", kubelet.CheckResourceName(m.target(r)))
		}
		p.add(key+".replicas", checkReplicas(r.Replicas))
		p.addSelectors(key+".devices", r.Devices)
		if j := slices.IndexFunc(m.rules[:i], func(e SharingRule) bool { return hides(&e, r) }); j >= 0 {
			p.add(key, fmt.Errorf("has no effect: %s matches all devices of %s", item(m.key, j), r.Name))
		}
	}
}

// overlap reports whether two rules certainly match the same devices, on any node.
func overlap(a, b *SharingRule) bool {
	same := func(s Selector) bool { return slices.Contains(b.Devices, s) }
	return a.Name == b.Name && (len(a.Devices) == 0 || len(b.Devices) == 0 || slices.ContainsFunc(a.Devices, same))
}

// hides reports whether an earlier rule matches every device that a later rule matches.
func hides(earlier, later *SharingRule) bool {
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
