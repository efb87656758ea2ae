package metrics

import (
	"strconv"
	"sync"

	"gpu-cdi-plugin/plugin/resource"
)

// listing is what is listed now, and how often each device changed its health. A device that is gone is no longer in it,
// so that the number of series does not grow with every MIG device that ever was.
type listing struct {
	mu        sync.Mutex
	resources []resource.Resource
	health    map[string]*health // by UUID
}

// health is what is remembered of a device.
type health struct {
	healthy    bool
	toHealthy  float64
	toWorse    float64
	stillThere bool
}

func (l *listing) set(resources []resource.Resource) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.resources = resources
	for _, h := range l.health {
		h.stillThere = false
	}
	for i := range resources {
		for j := range resources[i].Devices {
			l.note(&resources[i].Devices[j])
		}
	}
	for uuid, h := range l.health {
		if !h.stillThere {
			delete(l.health, uuid)
		}
	}
}

func (l *listing) note(d *resource.Device) {
	h := l.health[d.UUID]
	if h == nil {
		h = &health{healthy: d.Healthy}
		l.health[d.UUID] = h
	}
	switch {
	case d.Healthy && !h.healthy:
		h.toHealthy++
	case !d.Healthy && h.healthy:
		h.toWorse++
	}
	h.healthy, h.stillThere = d.Healthy, true
}

const (
	healthy   = "healthy"
	unhealthy = "unhealthy"
)

// families are the metrics of what is listed now.
func (l *listing) families() []*family {
	l.mu.Lock()
	defer l.mu.Unlock()
	count := gauge("devices", "Devices that are listed, replicas counted each.", "health", "resource")
	info := gauge("device_info", "A device that is listed.",
		"mig_profile", "numa_node", "pci_bus_id", "product", "replicas", "resource", "uuid")
	transitions := counter("device_health_transitions_total", "Changes of a device's health.", "to", "uuid")
	for i := range l.resources {
		tell(count, info, &l.resources[i])
	}
	for uuid, h := range l.health {
		transitions.set(h.toHealthy, healthy, uuid)
		transitions.set(h.toWorse, unhealthy, uuid)
	}
	return []*family{count, info, transitions}
}

func tell(count, info *family, r *resource.Resource) {
	count.begin(healthy, r.Name)
	count.begin(unhealthy, r.Name)
	replicas := map[string]int{}
	for i := range r.Devices {
		replicas[r.Devices[i].UUID]++
		if r.Devices[i].Healthy {
			count.add(1, healthy, r.Name)
		} else {
			count.add(1, unhealthy, r.Name)
		}
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		info.set(1, d.Profile, strconv.Itoa(d.NUMANode), d.PCIBusID, d.Model, strconv.Itoa(replicas[d.UUID]), r.Name, d.UUID)
	}
}

// streams remembers which resources the kubelet has read before.
type streams struct {
	mu   sync.Mutex
	seen map[string]bool
}

// note reports whether a stream is not the resource's first.
func (s *streams) note(resource string, connected bool) (again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seen == nil {
		s.seen = map[string]bool{}
	}
	again = s.seen[resource]
	s.seen[resource] = again || connected
	return again
}
