// Package metrics has the kubelet's metrics of device plugins, of its PodResources service and of its plugin watcher.
// Names, labels, buckets and help texts are those of k8s.io/kubernetes v1.36.3, so that dashboards for a kubelet can
// be used. All these metrics are ALPHA there.
//
// A resource has series until the end of its grace period. So there are only as many series as the manager accepts
// resources, whatever plugins do.
package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"

	"gpu-cdi-plugin/internal/promtext"
	"gpu-cdi-plugin/manager"
)

// Metrics is the manager's Observer. Its methods may be called concurrently.
type Metrics struct {
	registry      *prometheus.Registry
	registrations *prometheus.CounterVec
	allocations   *prometheus.HistogramVec
	calls         *prometheus.CounterVec // of PodResources
	methods       map[string]method
}

// method has the counters of one PodResources method. Some of them may be nil.
type method struct {
	version          string
	requests, errors *prometheus.CounterVec
}

var _ manager.Observer = (*Metrics)(nil)

// New returns metrics without series.
func New() *Metrics {
	const ofVersion = " Broken down by server api version."
	m := &Metrics{registry: prometheus.NewRegistry(), methods: map[string]method{
		v1alpha1.PodResourcesLister_List_FullMethodName: {version: "v1alpha1"},
	}}
	m.registrations = m.counters("device_plugin_registration_total",
		"Cumulative number of device plugin registrations. Broken down by resource name.", perResource)
	m.allocations = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Name: "device_plugin_alloc_duration_seconds",
		Help:    alpha + "Duration in seconds to serve a device plugin Allocation request. Broken down by resource name.",
		Buckets: prometheus.DefBuckets,
	}, []string{perResource})
	m.registry.MustRegister(m.allocations)
	m.calls = m.counters("pod_resources_endpoint_requests_total",
		"Cumulative number of requests to the PodResource endpoint."+ofVersion, perVersion)
	for _, each := range []struct{ full, name, service string }{
		{v1.PodResourcesLister_List_FullMethodName, "list", "List"},
		{v1.PodResourcesLister_Get_FullMethodName, "get", "Get"},
		{v1.PodResourcesLister_GetAllocatableResources_FullMethodName, "get_allocatable", "GetAllocatableResources"},
	} {
		help := "Number of requests to the PodResource " + each.service + " endpoint"
		m.methods[each.full] = method{
			version:  "v1",
			requests: m.counters("pod_resources_endpoint_requests_"+each.name, help+"."+ofVersion, perVersion),
			errors: m.counters("pod_resources_endpoint_errors_"+each.name,
				help+" which returned error."+ofVersion, perVersion),
		}
	}
	return m
}

const (
	namespace   = "kubelet"
	perResource = "resource_name"
	perVersion  = "server_api_version"
	alpha       = "[ALPHA] "
)

// counters registers a counter with one label.
func (m *Metrics) counters(name, help, label string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(
		prometheus.CounterOpts{Namespace: namespace, Name: name, Help: alpha + help},
		[]string{label},
	)
	m.registry.MustRegister(c)
	return c
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

// Called counts a call of PodResources by its full gRPC name, and its error if it has one.
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

// Text returns the metrics in Prometheus' text format, version 0.0.4.
func (m *Metrics) Text() ([]byte, error) {
	return promtext.Text(m.registry)
}
