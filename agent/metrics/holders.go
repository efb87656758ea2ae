package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/resource"
)

// AddHolders adds the metric device_held, with the containers that the function `holders` returns at each scrape.
func (m *Metrics) AddHolders(holders func() []podresources.Holder) {
	listed := func() []podresources.Holder {
		if m.cleared.Load() {
			return nil
		}
		return holders()
	}
	m.registry.MustRegister(holderCollector{listed, prometheus.NewDesc(namespace+"_device_held",
		"Number of devices with this UUID that a container holds; more than 1 are replicas.",
		[]string{"uuid", "resource", "namespace", "pod", "container"}, nil)})
}

// holderCollector makes one series for each device and container, with the labels of DCGM's exporter.
type holderCollector struct {
	holders func() []podresources.Holder
	desc    *prometheus.Desc
}

var _ prometheus.Collector = holderCollector{}

// Describe implements prometheus.Collector.
func (c holderCollector) Describe(descs chan<- *prometheus.Desc) { descs <- c.desc }

// Collect implements prometheus.Collector.
func (c holderCollector) Collect(metrics chan<- prometheus.Metric) {
	type series [5]string
	counts := map[series]float64{}
	for _, h := range c.holders() {
		for r, ids := range h.ByResource {
			for _, id := range ids {
				s := series{resource.UUIDOf(id), r, h.Namespace, h.Pod, h.Container}
				for i := range s {
					s[i] = strings.ToValidUTF8(s[i], "\uFFFD") // one bad label would fail the whole scrape
				}
				counts[s]++
			}
		}
	}
	for s, n := range counts {
		metrics <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, n, s[:]...)
	}
}
