// Package metrics counts what the device plugin does and answers for its health over HTTP.
//
// It measures the plugin, not the GPUs: what they do is what DCGM's exporter tells; the two are joined on the UUID.
package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc/codes"

	"gpu-cdi-plugin/node"
)

const namespace = "gpu_cdi_plugin"

// Metrics has the counters. It is told by the plugin and the inventory, whose Observer it is, and by Listed.
type Metrics struct {
	registry *prometheus.Registry

	registrations *prometheus.CounterVec
	connected     *prometheus.GaugeVec
	reconnects    *prometheus.CounterVec
	allocations   *prometheus.CounterVec
	allocated     *prometheus.CounterVec
	allocateTime  *prometheus.HistogramVec
	reconciles    *prometheus.CounterVec
	specWrites    prometheus.Counter
	specTime      prometheus.Histogram
	specSuccess   prometheus.Gauge
	specStale     prometheus.Gauge

	devices *deviceCollector
	streams streams
}

// BuildInfo is what the metric build_info says.
type BuildInfo struct{ Version, Revision, GoVersion string }

// New makes the metrics, all with their first values.
func New(build BuildInfo) *Metrics {
	m := &Metrics{
		registry:      prometheus.NewRegistry(),
		registrations: counters("registrations_total", "Attempts to register a resource with the kubelet, by result.", "resource", "result"),
		connected: prometheus.NewGaugeVec(gauge("stream_connected",
			"Whether the kubelet reads the list of the resource's devices (ListAndWatch)."), []string{"resource"}),
		reconnects:   counters("stream_reconnects_total", "Times that the kubelet asked for the list again.", "resource"),
		allocations:  counters("allocations_total", "Calls of Allocate, by gRPC code.", "resource", "result"),
		allocated:    counters("allocated_devices_total", "Devices that were handed out.", "resource"),
		allocateTime: prometheus.NewHistogramVec(histogram("allocate_duration_seconds", "Time to answer a call of Allocate.", fast), []string{"resource"}),
		reconciles:   counters("reconciles_total", "Looks at the node, by result.", "result"),
		specWrites: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "spec_writes_total", Help: "Times that the CDI spec was written or removed.",
		}),
		specTime:    prometheus.NewHistogram(histogram("spec_generation_duration_seconds", "Time to look at the node and put the CDI spec right.", slow)),
		specSuccess: prometheus.NewGauge(gauge("spec_last_success_timestamp_seconds", "When the CDI spec was last known to be right.")),
		specStale:   prometheus.NewGauge(gauge("spec_stale", "Whether the CDI spec may not be what the node should have (1).")),
		devices:     newDeviceCollector(),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: namespace, Name: "build_info", Help: "The program.",
		ConstLabels: prometheus.Labels{"version": build.Version, "revision": build.Revision, "goversion": build.GoVersion},
	})
	info.Set(1)
	m.registry.MustRegister(info, m.registrations, m.connected, m.reconnects, m.allocations, m.allocated, m.allocateTime,
		m.reconciles, m.specWrites, m.specTime, m.specSuccess, m.specStale, m.devices,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, result := range []string{success, failure} {
		m.reconciles.WithLabelValues(result)
	}
	return m
}

const (
	success = "success"
	failure = "error"
)

// Buckets in seconds: of an answer from memory, and of a look at the driver.
var (
	fast = []float64{25e-6, 50e-6, 1e-4, 25e-5, 5e-4, 1e-3, 25e-4, 5e-3, 1e-2, 5e-2, .25, 1}
	slow = []float64{1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, .1, .25, .5, 1, 5, 30}
)

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func gauge(name, help string) prometheus.GaugeOpts {
	return prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}
}

func histogram(name, help string, buckets []float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}
}

// Registered counts an attempt to register.
func (m *Metrics) Registered(resource string, err error) {
	m.registrations.WithLabelValues(resource, result(err)).Inc()
}

func result(err error) string {
	if err != nil {
		return failure
	}
	return success
}

// Connected notes that the kubelet began to read a resource's list, or that it stopped.
func (m *Metrics) Connected(resource string, connected bool) {
	again := m.streams.note(resource, connected)
	if !connected {
		m.connected.WithLabelValues(resource).Set(0)
		return
	}
	m.connected.WithLabelValues(resource).Set(1)
	if again {
		m.reconnects.WithLabelValues(resource).Inc()
	}
}

// Allocated counts a call of Allocate.
func (m *Metrics) Allocated(resource string, code codes.Code, devices int, took time.Duration) {
	m.allocations.WithLabelValues(resource, code.String()).Inc()
	m.allocateTime.WithLabelValues(resource).Observe(took.Seconds())
	if code == codes.OK {
		m.allocated.WithLabelValues(resource).Add(float64(devices))
	}
}

// Reconciled notes a look at the node.
func (m *Metrics) Reconciled(took time.Duration, written bool, err error) {
	m.reconciles.WithLabelValues(result(err)).Inc()
	m.specTime.Observe(took.Seconds())
	if written {
		m.specWrites.Inc()
	}
	if err != nil {
		m.specStale.Set(1)
		return
	}
	m.specStale.Set(0)
	m.specSuccess.SetToCurrentTime()
}

// Listed notes what is listed now. The counters of a resource that is new begin at 0.
func (m *Metrics) Listed(s node.State) {
	for _, r := range s.Resources {
		m.registrations.WithLabelValues(r.Name, success)
		m.registrations.WithLabelValues(r.Name, failure)
		m.connected.WithLabelValues(r.Name)
		m.reconnects.WithLabelValues(r.Name)
		m.allocations.WithLabelValues(r.Name, codes.OK.String())
		m.allocated.WithLabelValues(r.Name)
		m.allocateTime.WithLabelValues(r.Name)
	}
	m.devices.set(s.Resources, s.Snapshot)
}
