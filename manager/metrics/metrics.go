// Package metrics has the kubelet's metrics of device plugins, of its PodResources service and of its plugin watcher.
// Names, labels, buckets and help texts are those of k8s.io/kubernetes v1.36.3, where all of them are ALPHA: what reads
// them of a kubelet reads them here.
//
// A resource has series while it has a plugin, and until the end of its grace period. So there are no more of them than
// the manager accepts resources, whatever plugins do.
package metrics

import (
	"bytes"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/common/expfmt"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"

	"gpu-cdi-plugin/manager"
)

// Metrics has the metrics. It is the manager's Observer. Its methods may be called concurrently.
type Metrics struct {
	registry      *prometheus.Registry
	registrations *prometheus.CounterVec
	allocations   *prometheus.HistogramVec
	calls         *prometheus.CounterVec // of PodResources
	methods       map[string]method
}

// method is a method of PodResources. It may have no counters of its own.
type method struct {
	version          string
	requests, errors *prometheus.CounterVec
}

var _ manager.Observer = (*Metrics)(nil)

// New returns the metrics without any series.
func New() *Metrics {
	registry := prometheus.NewRegistry()
	auto := promauto.With(registry)
	const perResource = "resource_name"
	calls := func(name, help string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{
			Namespace: "kubelet", Subsystem: "pod_resources_endpoint", Name: name,
			Help: "[ALPHA] " + help + " Broken down by server api version.",
		}, []string{"server_api_version"})
	}
	ofMethod := func(version, name, service string) method {
		to := "Number of requests to the PodResource " + service + " endpoint"
		return method{
			version, calls("requests_"+name, to+"."), calls("errors_"+name, to+" which returned error."),
		}
	}
	return &Metrics{
		registry: registry,
		registrations: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "kubelet_device_plugin_registration_total",
			Help: "[ALPHA] Cumulative number of device plugin registrations. Broken down by resource name.",
		}, []string{perResource}),
		allocations: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kubelet_device_plugin_alloc_duration_seconds",
			Help: "[ALPHA] Duration in seconds to serve a device plugin Allocation request. " +
				"Broken down by resource name.",
			Buckets: prometheus.DefBuckets,
		}, []string{perResource}),
		calls: calls("requests_total", "Cumulative number of requests to the PodResource endpoint."),
		methods: map[string]method{
			v1.PodResourcesLister_List_FullMethodName: ofMethod("v1", "list", "List"),
			v1.PodResourcesLister_Get_FullMethodName:  ofMethod("v1", "get", "Get"),
			v1.PodResourcesLister_GetAllocatableResources_FullMethodName: ofMethod("v1", "get_allocatable",
				"GetAllocatableResources"),
			v1alpha1.PodResourcesLister_List_FullMethodName: {version: "v1alpha1"},
		},
	}
}

// Registered counts a registration.
func (m *Metrics) Registered(resource string) { m.registrations.WithLabelValues(resource).Inc() }

// Allocated records the duration of an Allocate call.
func (m *Metrics) Allocated(resource string, took time.Duration) {
	m.allocations.WithLabelValues(resource).Observe(took.Seconds())
}

// Removed removes the series of a resource.
func (m *Metrics) Removed(resource string) {
	m.registrations.DeleteLabelValues(resource)
	m.allocations.DeleteLabelValues(resource)
}

// Called counts a call of PodResources by its full name in gRPC, and its error if it has one.
func (m *Metrics) Called(name string, err error) {
	called, ok := m.methods[name]
	if !ok {
		return
	}
	m.calls.WithLabelValues(called.version).Inc()
	if called.requests == nil {
		return
	}
	called.requests.WithLabelValues(called.version).Inc()
	if err != nil {
		called.errors.WithLabelValues(called.version).Inc()
	}
}

// Text returns the metrics in the text format of Prometheus, version 0.0.4.
func (m *Metrics) Text() ([]byte, error) {
	families, err := m.registry.Gather()
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
			return nil, err
		}
	}
	return text.Bytes(), nil
}
