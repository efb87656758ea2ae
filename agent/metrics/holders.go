package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"gpu-cdi-plugin/agent/ledger"
)

// AddHolders adds the metric device_held, with what the function `holders` returns at each scrape.
func (m *Metrics) AddHolders(holders func() []ledger.Holding) {
	listed := func() []ledger.Holding {
		if m.cleared.Load() {
			return nil
		}
		return holders()
	}
	m.registry.MustRegister(holderCollector{listed, prometheus.NewDesc(namespace+"_device_held",
		"Number of devices with this UUID that a container holds; more than 1 are replicas.",
		[]string{"uuid", "resource", "namespace", "pod", "container", "dra_claim_name"}, nil)})
}

// holderCollector makes one series for each device and container, with the labels of DCGM's exporter.
type holderCollector struct {
	holders func() []ledger.Holding
	desc    *prometheus.Desc
}

var _ prometheus.Collector = holderCollector{}

// Describe implements prometheus.Collector.
func (c holderCollector) Describe(descs chan<- *prometheus.Desc) { descs <- c.desc }

// Collect implements prometheus.Collector.
func (c holderCollector) Collect(metrics chan<- prometheus.Metric) {
	type series [6]string
	counts := map[series]float64{}
	for _, h := range c.holders() {
		if h.State != "" {
			continue // the kubelet does not list it
		}
		for _, one := range h.Containers {
			s := series{h.UUID, h.Resource, h.Namespace, one.Pod, one.Container, h.Claim}
			for i := range s {
				s[i] = strings.ToValidUTF8(s[i], "\uFFFD") // one bad label would fail the whole scrape
			}
			counts[s] += float64(max(h.Replicas, 1))
		}
	}
	for s, n := range counts {
		metrics <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, n, s[:]...)
	}
}
