// Package metrics counts what the device plugin does and answers for its health over HTTP.
//
// It measures the plugin, not the GPUs: what they do is what DCGM's exporter tells; the two are joined on the UUID.
package metrics

import (
	"bytes"
	"time"

	"google.golang.org/grpc/codes"

	"gpu-cdi-plugin/plugin/inventory"
)

const namespace = "gpu_cdi_plugin"

// Metrics has the counters. It is told by the plugin and the inventory, whose Observer it is, and by Listed.
type Metrics struct {
	build         *family
	registrations *family
	connected     *family
	reconnects    *family
	allocations   *family
	allocated     *family
	allocateTime  *family
	reconciles    *family
	specWrites    *family
	specTime      *family
	specSuccess   *family
	specStale     *family

	listing listing
	streams streams
}

// BuildInfo is what the metric build_info says.
type BuildInfo struct{ Version, Revision, GoVersion string }

// New makes the metrics, all with their first values.
func New(build BuildInfo) *Metrics {
	m := &Metrics{
		build:         gauge("build_info", "The program.", "goversion", "revision", "version"),
		registrations: counter("registrations_total", "Attempts to register a resource with the kubelet, by result.", "resource", "result"),
		connected: gauge("stream_connected",
			"Whether the kubelet reads the list of the resource's devices (ListAndWatch).", "resource"),
		reconnects:   counter("stream_reconnects_total", "Times that the kubelet asked for the list again.", "resource"),
		allocations:  counter("allocations_total", "Calls of Allocate, by gRPC code.", "resource", "result"),
		allocated:    counter("allocated_devices_total", "Devices that were handed out.", "resource"),
		allocateTime: histogram("allocate_duration_seconds", "Time to answer a call of Allocate.", fast, "resource"),
		reconciles:   counter("reconciles_total", "Looks at the node, by result.", "result"),
		specWrites:   counter("spec_writes_total", "Times that the CDI spec was written or removed."),
		specTime:     histogram("spec_generation_duration_seconds", "Time to look at the node and put the CDI spec right.", slow),
		specSuccess:  gauge("spec_last_success_timestamp_seconds", "When the CDI spec was last known to be right."),
		specStale:    gauge("spec_stale", "Whether the CDI spec may not be what the node should have (1)."),
		listing:      listing{health: map[string]*health{}},
	}
	m.build.set(1, build.GoVersion, build.Revision, build.Version)
	m.reconciles.begin(success)
	m.reconciles.begin(failure)
	for _, f := range []*family{m.specWrites, m.specTime, m.specSuccess, m.specStale} {
		f.begin()
	}
	return m
}

// text is all metrics as they are now.
func (m *Metrics) text() []byte {
	var b bytes.Buffer
	families := append(m.listing.families(), m.build, m.registrations, m.connected, m.reconnects, m.allocations, m.allocated,
		m.allocateTime, m.reconciles, m.specWrites, m.specTime, m.specSuccess, m.specStale)
	for _, f := range families {
		f.write(&b)
	}
	writeProcess(&b)
	return b.Bytes()
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

// Registered counts an attempt to register.
func (m *Metrics) Registered(resource string, err error) {
	m.registrations.add(1, resource, result(err))
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
		m.connected.set(0, resource)
		return
	}
	m.connected.set(1, resource)
	if again {
		m.reconnects.add(1, resource)
	}
}

// Allocated counts a call of Allocate.
func (m *Metrics) Allocated(resource string, code codes.Code, devices int, took time.Duration) {
	m.allocations.add(1, resource, code.String())
	m.allocateTime.observe(took.Seconds(), resource)
	if code == codes.OK {
		m.allocated.add(float64(devices), resource)
	}
}

// Reconciled notes a look at the node.
func (m *Metrics) Reconciled(took time.Duration, written bool, err error) {
	m.reconciles.add(1, result(err))
	m.specTime.observe(took.Seconds())
	if written {
		m.specWrites.add(1)
	}
	if err != nil {
		m.specStale.set(1)
		return
	}
	m.specStale.set(0)
	m.specSuccess.set(float64(time.Now().UnixMilli()) / 1e3)
}

// Listed notes what is listed now. The counters of a resource that is new begin at 0.
func (m *Metrics) Listed(s inventory.State) {
	for _, r := range s.Resources {
		m.registrations.begin(r.Name, success)
		m.registrations.begin(r.Name, failure)
		m.connected.begin(r.Name)
		m.reconnects.begin(r.Name)
		m.allocations.begin(r.Name, codes.OK.String())
		m.allocated.begin(r.Name)
		m.allocateTime.begin(r.Name)
	}
	m.listing.set(s.Resources)
}
