package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"gpu-cdi-plugin/manager/lease"
)

// ObserveLeases adds the metrics of leases, which a kubelet does not have. It is called once.
func (m *Metrics) ObserveLeases(counts func() lease.Counts) { m.registry.MustRegister(leases(counts)) }

// leases counts the leases whenever the metrics are read.
type leases func() lease.Counts

var (
	leaseCount   = prometheus.NewDesc("device_manager_leases", "Leases that have begun and not ended.", nil, nil)
	leaseWaiting = prometheus.NewDesc("device_manager_leases_waiting", "Requests that wait for a lease.", nil, nil)
	leaseSeconds = prometheus.NewDesc("device_manager_lease_device_seconds_total",
		"Device-seconds of the leases that have ended since the start: the number of devices, multiplied by the time.",
		nil, nil)
)

// Describe implements prometheus.Collector.
func (leases) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- leaseCount
	descriptions <- leaseWaiting
	descriptions <- leaseSeconds
}

// Collect implements prometheus.Collector.
func (l leases) Collect(metrics chan<- prometheus.Metric) {
	now := l()
	metrics <- prometheus.MustNewConstMetric(leaseCount, prometheus.GaugeValue, float64(now.Leases))
	metrics <- prometheus.MustNewConstMetric(leaseWaiting, prometheus.GaugeValue, float64(now.Waiting))
	metrics <- prometheus.MustNewConstMetric(leaseSeconds, prometheus.CounterValue, now.DeviceSeconds)
}
