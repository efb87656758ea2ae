package plugin

import (
	"strconv"
	"strings"

	"gpu-cdi-plugin/resource"
)

// usedSlices returns how many compute slices of each GPU, by UUID, pods hold as MIG devices of resources other than
// `except`.
func (p *Plugin) usedSlices(except string) map[string]int {
	held := p.opts.Allocate.Preference.Held
	if held == nil {
		return nil
	}
	ids := held()
	p.mu.Lock()
	defer p.mu.Unlock()
	used := map[string]int{}
	for name, e := range p.endpoints {
		if name == except {
			continue
		}
		counted := map[string]bool{} // UUIDs of MIG devices: pods may hold several replicas of one
		devices := e.server.list.Load().resource.Devices
		for i := range devices {
			if d := &devices[i]; ids[d.ID] && !counted[d.UUID] {
				counted[d.UUID] = true
				used[d.Parent] += computeSlices(d)
			}
		}
	}
	return used
}

// computeSlices returns the number with which the profile's name of a MIG device begins, which is its number of
// compute slices: "1c.3g.40gb" has 1, "2g.20gb" has 2. For a whole GPU it returns 0.
func computeSlices(d *resource.Device) int {
	number := d.Profile[:len(d.Profile)-len(strings.TrimLeft(d.Profile, "0123456789"))]
	n, _ := strconv.Atoi(number) // 0 if there is no number
	return n
}
