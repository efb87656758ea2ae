package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

const (
	healthy   = "healthy"
	unhealthy = "unhealthy"
)

func healthOf(isHealthy bool) string {
	if isHealthy {
		return healthy
	}
	return unhealthy
}

// Advertised records the advertised devices. It drops devices that are gone, so that the number of series does not
// grow with each new MIG device.
func (m *Metrics) Advertised(s node.State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.healthy
	m.healthy = map[string]bool{}
	m.devices.Reset()
	m.state.Reset()
	m.received.Reset()
	for uuid, h := range s.Health {
		m.state.WithLabelValues(uuid, string(h.State)).Set(1)
		if _, isGPU := m.sources[uuid]; isGPU {
			m.setReceived(uuid)
		}
	}
	m.info.Reset()
	for i := range s.Resources {
		m.advertised(&s.Resources[i], before)
	}
	for uuid := range before {
		if _, there := m.healthy[uuid]; !there {
			m.transitions.DeletePartialMatch(prometheus.Labels{"uuid": uuid})
		}
	}
	if s.Snapshot == nil {
		return
	}
	m.readable.Reset()
	for i := range s.Snapshot.Devices {
		g := &s.Snapshot.Devices[i]
		readable := m.readable.WithLabelValues(strconv.Itoa(g.Index), g.PCIBusID, g.UUID)
		if g.Usable() {
			readable.Set(1)
		}
	}
}

// Clear drops all devices and their holders for good, since another instance reports them.
func (m *Metrics) Clear() {
	m.cleared.Store(true)
	m.Advertised(node.State{Snapshot: &gpu.Snapshot{}})
}

// advertised records a resource. `before` is the previous health of its devices. The counters of a new resource begin
// at 0.
func (m *Metrics) advertised(r *resource.Resource, before map[string]bool) {
	m.registrations.WithLabelValues(r.Name, success)
	m.registrations.WithLabelValues(r.Name, failure)
	m.connected.WithLabelValues(r.Name)
	m.reconnects.WithLabelValues(r.Name)
	m.allocations.WithLabelValues(r.Name, codes.OK.String())
	m.allocated.WithLabelValues(r.Name)
	m.allocateTime.WithLabelValues(r.Name)
	m.devices.WithLabelValues(r.Name, healthy)
	m.devices.WithLabelValues(r.Name, unhealthy)
	replicas := map[string]int{}
	for i := range r.Devices {
		replicas[r.Devices[i].UUID]++
		m.devices.WithLabelValues(r.Name, healthOf(r.Devices[i].Healthy)).Inc()
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if _, recorded := m.healthy[d.UUID]; recorded { // by another replica
			continue
		}
		m.healthy[d.UUID] = d.Healthy
		m.info.WithLabelValues(d.UUID, r.Name, d.PCIBusID, d.Model, d.Profile, strconv.Itoa(d.NUMANode),
			strconv.Itoa(replicas[d.UUID])).Set(1)
		m.transitions.WithLabelValues(d.UUID, healthy)
		m.transitions.WithLabelValues(d.UUID, unhealthy)
		if was, known := before[d.UUID]; known && was != d.Healthy {
			m.transitions.WithLabelValues(d.UUID, healthOf(d.Healthy)).Inc()
		}
	}
}

// gather returns all metrics, and blocks Advertised meanwhile. The metrics of the Go runtime and of the process come
// from the default registry of the Prometheus library.
func (m *Metrics) gather() ([]*dto.MetricFamily, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return prometheus.Gatherers{m.registry, prometheus.DefaultGatherer}.Gather()
}
