// Package metrics has the metrics of the device plugin and serves them, with its health and readiness, over HTTP.
//
// It measures only the plugin. For the GPUs there is DCGM's exporter; the metrics of both have the UUID of the device.
package metrics

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/codes"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
)

const namespace = "gpu_cdi_plugin"

// Metrics has the metrics. It is an Observer of the plugin and of the node. Advertised records the advertised devices.
// All methods may be called concurrently.
type Metrics struct {
	registry      *prometheus.Registry
	cleared       atomic.Bool
	registrations *prometheus.CounterVec
	connected     *prometheus.GaugeVec
	reconnects    *prometheus.CounterVec
	allocations   *prometheus.CounterVec
	allocated     *prometheus.CounterVec
	allocateTime  *prometheus.HistogramVec
	reconciles    *prometheus.CounterVec
	xids          *prometheus.CounterVec
	events        *prometheus.CounterVec
	received      *prometheus.GaugeVec
	prestart      *prometheus.HistogramVec
	state         *prometheus.GaugeVec
	specWrites    prometheus.Counter
	specTime      prometheus.Observer
	specSuccess   prometheus.Gauge
	specStale     prometheus.Gauge
	devices       *prometheus.GaugeVec
	info          *prometheus.GaugeVec
	transitions   *prometheus.CounterVec
	readable      *prometheus.GaugeVec
	remarks       prometheus.Gauge
	claims        *prometheus.CounterVec
	claimTime     *prometheus.HistogramVec
	sliceWrites   *prometheus.CounterVec

	mu            sync.Mutex
	watchedBefore map[string]bool // resources that the kubelet has watched so far
	healthy       map[string]bool // of each advertised device, by UUID
	sources       map[string]bool // by UUID, also of GPUs that are gone: whether events are received
}

// BuildInfo has the labels of the metric build_info.
type BuildInfo struct{ Version, Revision, GoVersion string }

// New returns the metrics with their initial values.
func New(build BuildInfo) *Metrics {
	const perResource = "resource"
	registry := prometheus.NewRegistry()
	auto := promauto.With(registry)
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return auto.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	histograms := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return auto.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: name, Help: help, Buckets: buckets,
		}, labels)
	}
	m := &Metrics{
		registry:      registry,
		watchedBefore: map[string]bool{},
		sources:       map[string]bool{},
		registrations: counters("registrations_total",
			"Attempts to register a resource with the kubelet, by result.", perResource, "result"),
		connected: gauges("stream_connected",
			"Whether the kubelet watches the resource's devices, with a ListAndWatch stream (1).", perResource),
		reconnects: counters("stream_reconnects_total",
			"ListAndWatch streams after the resource's first.", perResource),
		allocations:  counters("allocations_total", "Allocate calls, by gRPC code.", perResource, "result"),
		allocated:    counters("allocated_devices_total", "Devices that were allocated.", perResource),
		allocateTime: histograms("allocate_duration_seconds", "Duration of Allocate calls.", fast, perResource),
		reconciles:   counters("reconciles_total", "Reconciliations, by result.", "result"),
		xids:         counters("gpu_xids_total", "XIDs that the driver reported for a GPU, by code.", "uuid", "xid"),
		events: counters("gpu_events_total",
			"Events other than XIDs that the driver reported for a GPU, by kind.", "uuid", "event"),
		received: gauges("gpu_events_received",
			"Whether the driver's events of a GPU are received (1). Without them only probes see its faults.", "uuid"),
		prestart: histograms("prestart_seconds",
			"Duration of the steps that prepare a device for a container.", slow, "step", "result"),
		state: gauges("device_state", "The health of a device (1 for its state).", "uuid", "state"),
		specWrites: counters("spec_writes_total",
			"Times that the CDI spec was written or removed.").WithLabelValues(),
		specTime: histograms("spec_generation_duration_seconds",
			"Duration of reconciliations: reading the driver and correcting the CDI spec.", slow).WithLabelValues(),
		specSuccess: gauges("spec_last_success_timestamp_seconds",
			"Time of the last successful reconciliation.").WithLabelValues(),
		specStale: gauges("spec_stale",
			"Whether the last reconciliation failed, so that the CDI spec may be out of date (1).").WithLabelValues(),
		devices: gauges("devices", "Advertised devices, by health; each replica counts.", perResource, "health"),
		info: gauges("device_info", "An advertised device.",
			"uuid", perResource, "pci_bus_id", "product", "mig_profile", "numa_node", "replicas"),
		transitions: counters("device_health_transitions_total", "Changes of a device's health, by the new health.",
			"uuid", "to"),
		readable: gauges("gpu_readable", "Whether a GPU of the driver can be read (1).",
			"index", "pci_bus_id", "uuid"),
		remarks: gauges("remarks",
			"Number of things that are wrong on the node; /readyz and the log have their text.").WithLabelValues(),
		claims: counters("dra_requests_total",
			"Requests of the kubelet to prepare or unprepare a ResourceClaim, by result.", "operation", "result"),
		claimTime: histograms("dra_request_duration_seconds",
			"Duration of requests of the kubelet to prepare or unprepare a ResourceClaim.", slow, "operation"),
		sliceWrites: counters("dra_slice_writes_total",
			"Requests that create, change or delete a ResourceSlice of the node, by result.", "result"),
	}
	gauges("build_info", "The version of the program.", "version", "revision", "goversion").
		WithLabelValues(build.Version, build.Revision, build.GoVersion).Set(1)
	for _, result := range []string{success, failure} {
		m.reconciles.WithLabelValues(result)
	}
	return m
}

const (
	success = "success"
	failure = "error"
)

// Buckets in seconds: for responses from memory, and for reconciliations.
var (
	fast = []float64{25e-6, 50e-6, 1e-4, 25e-5, 5e-4, 1e-3, 25e-4, 5e-3, 1e-2, 5e-2, .25, 1}
	slow = []float64{1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, .1, .25, .5, 1, 5, 30}
)

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

// Watched records that the kubelet watches a resource's devices from now on, or no longer does.
func (m *Metrics) Watched(resource string, watched bool) {
	if !watched {
		m.connected.WithLabelValues(resource).Set(0)
		return
	}
	m.connected.WithLabelValues(resource).Set(1)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watchedBefore[resource] {
		m.reconnects.WithLabelValues(resource).Inc()
	}
	m.watchedBefore[resource] = true
}

// Allocated counts an Allocate call.
func (m *Metrics) Allocated(resource string, code codes.Code, devices int, took time.Duration) {
	m.allocations.WithLabelValues(resource, code.String()).Inc()
	m.allocateTime.WithLabelValues(resource).Observe(took.Seconds())
	if code == codes.OK {
		m.allocated.WithLabelValues(resource).Add(float64(devices))
	}
}

// Event counts an event of a GPU. An XID is counted by its code, any other event by its kind.
func (m *Metrics) Event(e gpu.Event) {
	if e.Kind == gpu.EventXID {
		m.xids.WithLabelValues(e.GPU, strconv.FormatUint(e.XID, 10)).Inc()
		return
	}
	m.events.WithLabelValues(e.GPU, string(e.Kind)).Inc()
}

// Prepared records the preparation of a device for a container.
func (m *Metrics) Prepared(r *prepare.Record) {
	for _, s := range r.Steps {
		m.prestart.WithLabelValues(s.Name, string(s.Result)).Observe(s.Duration.Seconds())
	}
}

// EventSource records whether the events of a GPU are received.
func (m *Metrics) EventSource(gpuUUID string, received bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sources[gpuUUID] = received
	m.setReceived(gpuUUID)
}

func (m *Metrics) setReceived(gpuUUID string) {
	value := 0.0
	if m.sources[gpuUUID] {
		value = 1
	}
	m.received.WithLabelValues(gpuUUID).Set(value)
}

// Reconciled records a reconciliation: its duration, whether it wrote or removed the CDI spec, and its error.
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
