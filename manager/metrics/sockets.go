package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// ObserveSockets adds the metric of the plugin watcher. The function `list` returns for each socket, by path, whether
// the plugin there is registered. ObserveSockets is called once.
func (m *Metrics) ObserveSockets(list func() map[string]bool) { m.registry.MustRegister(sockets(list)) }

// sockets counts the plugins whenever the metrics are read.
type sockets func() map[string]bool

var totalPlugins = prometheus.NewDesc("plugin_manager_total_plugins",
	alpha+"Number of plugins in Plugin Manager", []string{"socket_path", "state"}, nil)

// Describe implements prometheus.Collector.
func (sockets) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- totalPlugins }

// Collect implements prometheus.Collector.
func (s sockets) Collect(metrics chan<- prometheus.Metric) {
	type series struct{ path, state string }
	counts := map[series]float64{}
	for path, registered := range s() {
		path = strings.ToValidUTF8(path, "\uFFFD") // like for all label values; two paths can become equal
		counts[series{path, "desired_state_of_world"}]++
		if registered {
			counts[series{path, "actual_state_of_world"}]++
		}
	}
	for of, count := range counts {
		metrics <- prometheus.MustNewConstMetric(totalPlugins, prometheus.GaugeValue, count, of.path, of.state)
	}
}
