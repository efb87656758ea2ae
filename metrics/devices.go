package metrics

import (
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// deviceCollector collects what is advertised now, and how often the health of each device changed. It forgets a device
// that is gone, so that the number of series does not grow with every MIG device that ever was.
type deviceCollector struct {
	count, info, transitions, readable *prometheus.Desc

	mu        sync.Mutex
	resources []resource.Resource
	gpus      []gpu.Device
	health    map[string]health // by UUID
}

// health is the current health of a device and how often it became healthy and unhealthy.
type health struct {
	healthy     bool
	toHealthy   float64
	toUnhealthy float64
}

func newDeviceCollector() *deviceCollector {
	describe := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	return &deviceCollector{
		count: describe("devices", "Advertised devices, by health; each replica counts.", "resource", "health"),
		info: describe("device_info", "An advertised device.",
			"uuid", "resource", "pci_bus_id", "product", "mig_profile", "numa_node", "replicas"),
		transitions: describe("device_health_transitions_total", "Changes of a device's health, by the new health.",
			"uuid", "to"),
		readable: describe("gpu_readable", "Whether a GPU of the driver can be read (1).",
			"index", "pci_bus_id", "uuid"),
		health: map[string]health{},
	}
}

var _ prometheus.Collector = (*deviceCollector)(nil)

// set replaces what is collected. A nil snapshot leaves the GPUs as they were.
func (c *deviceCollector) set(resources []resource.Resource, snapshot *gpu.Snapshot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resources = resources
	if snapshot != nil {
		c.gpus = snapshot.Devices
	}
	current := map[string]health{}
	for i := range resources {
		for j := range resources[i].Devices {
			d := &resources[i].Devices[j]
			h, known := c.health[d.UUID]
			switch {
			case known && d.Healthy && !h.healthy:
				h.toHealthy++
			case known && !d.Healthy && h.healthy:
				h.toUnhealthy++
			}
			h.healthy = d.Healthy
			c.health[d.UUID], current[d.UUID] = h, h
		}
	}
	c.health = current
}

// Describe sends the descriptions of the metrics.
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

// Collect sends the current values.
func (c *deviceCollector) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	send := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
	}
	for i := range c.resources {
		r := &c.resources[i]
		replicas, good := map[string]int{}, 0
		for j := range r.Devices {
			replicas[r.Devices[j].UUID]++
			if r.Devices[j].Healthy {
				good++
			}
		}
		send(c.count, prometheus.GaugeValue, float64(good), r.Name, healthy)
		send(c.count, prometheus.GaugeValue, float64(len(r.Devices)-good), r.Name, unhealthy)
		for j := range r.Devices {
			d := &r.Devices[j]
			if n, ok := replicas[d.UUID]; ok { // the first of its replicas
				delete(replicas, d.UUID)
				send(c.info, prometheus.GaugeValue, 1, d.UUID, r.Name, d.PCIBusID, d.Model, d.Profile,
					strconv.Itoa(d.NUMANode), strconv.Itoa(n))
			}
		}
	}
	for i := range c.gpus {
		g, readable := &c.gpus[i], 0.
		if g.Usable() {
			readable = 1
		}
		send(c.readable, prometheus.GaugeValue, readable, strconv.Itoa(g.Index), g.PCIBusID, g.UUID)
	}
	for uuid, h := range c.health {
		send(c.transitions, prometheus.CounterValue, h.toHealthy, uuid, healthy)
		send(c.transitions, prometheus.CounterValue, h.toUnhealthy, uuid, unhealthy)
	}
}
