package metrics

import (
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// deviceCollector has what is listed now, and how often each device changed its health. A device that is gone is no
// longer in it, so that the number of series does not grow with every MIG device that ever was.
type deviceCollector struct {
	count, info, transitions, readable *prometheus.Desc

	mu        sync.Mutex
	resources []resource.Resource
	gpus      []gpu.Device
	health    map[string]*health // by UUID
}

// health is what is remembered of a device.
type health struct {
	healthy    bool
	toHealthy  float64
	toWorse    float64
	stillThere bool
}

func newDeviceCollector() *deviceCollector {
	describe := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	return &deviceCollector{
		count: describe("devices", "Devices that are listed, replicas counted each.", "resource", "health"),
		info: describe("device_info", "A device that is listed.",
			"uuid", "resource", "pci_bus_id", "product", "mig_profile", "numa_node", "replicas"),
		transitions: describe("device_health_transitions_total", "Changes of a device's health.", "uuid", "to"),
		readable: describe("gpu_readable", "Whether a GPU of the driver answers and could be read (1).",
			"index", "pci_bus_id", "uuid"),
		health: map[string]*health{},
	}
}

var _ prometheus.Collector = (*deviceCollector)(nil)

func (c *deviceCollector) set(resources []resource.Resource, snapshot *gpu.Snapshot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resources = resources
	if snapshot != nil {
		c.gpus = snapshot.Devices
	}
	for _, h := range c.health {
		h.stillThere = false
	}
	for i := range resources {
		for j := range resources[i].Devices {
			c.note(&resources[i].Devices[j])
		}
	}
	for uuid, h := range c.health {
		if !h.stillThere {
			delete(c.health, uuid)
		}
	}
}

func (c *deviceCollector) note(d *resource.Device) {
	h := c.health[d.UUID]
	if h == nil {
		h = &health{healthy: d.Healthy}
		c.health[d.UUID] = h
	}
	switch {
	case d.Healthy && !h.healthy:
		h.toHealthy++
	case !d.Healthy && h.healthy:
		h.toWorse++
	}
	h.healthy, h.stillThere = d.Healthy, true
}

// Describe and Collect make it a collector.
func (c *deviceCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.count
	ch <- c.info
	ch <- c.transitions
	ch <- c.readable
}

const (
	healthy   = "healthy"
	unhealthy = "unhealthy"
)

// Collect sends the values of now.
func (c *deviceCollector) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.resources {
		c.collect(ch, &c.resources[i])
	}
	for i := range c.gpus {
		g, readable := &c.gpus[i], 0.
		if g.Usable() {
			readable = 1
		}
		ch <- prometheus.MustNewConstMetric(c.readable, prometheus.GaugeValue, readable, strconv.Itoa(g.Index), g.PCIBusID, g.UUID)
	}
	for uuid, h := range c.health {
		ch <- prometheus.MustNewConstMetric(c.transitions, prometheus.CounterValue, h.toHealthy, uuid, healthy)
		ch <- prometheus.MustNewConstMetric(c.transitions, prometheus.CounterValue, h.toWorse, uuid, unhealthy)
	}
}

func (c *deviceCollector) collect(ch chan<- prometheus.Metric, r *resource.Resource) {
	good := 0
	replicas := map[string]int{}
	for i := range r.Devices {
		replicas[r.Devices[i].UUID]++
		if r.Devices[i].Healthy {
			good++
		}
	}
	ch <- prometheus.MustNewConstMetric(c.count, prometheus.GaugeValue, float64(good), r.Name, healthy)
	ch <- prometheus.MustNewConstMetric(c.count, prometheus.GaugeValue, float64(len(r.Devices)-good), r.Name, unhealthy)
	for i := range r.Devices {
		d := &r.Devices[i]
		n := replicas[d.UUID]
		if delete(replicas, d.UUID); n == 0 {
			continue
		}
		ch <- prometheus.MustNewConstMetric(c.info, prometheus.GaugeValue, 1, d.UUID, r.Name, d.PCIBusID, d.Model, d.Profile,
			strconv.Itoa(d.NUMANode), strconv.Itoa(n))
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
