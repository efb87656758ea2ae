package metrics

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

func succeed() error { return nil }

// get sends a request to a handler.
func get(t *testing.T, h http.Handler, method, path string) (status int, body string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, nil))
	return w.Code, w.Body.String()
}

// scrape returns the page /metrics.
func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	status, body := get(t, m.handler(Checks{Healthy: succeed, Ready: succeed}), http.MethodGet, "/metrics")
	if status != http.StatusOK {
		t.Fatalf("status %d: %s", status, body)
	}
	return body
}

func expect(t *testing.T, m *Metrics, lines ...string) {
	t.Helper()
	body := scrape(t, m)
	for _, line := range lines {
		if !strings.Contains(body, "\n"+line+"\n") {
			name, _, _ := strings.Cut(line, "{")
			var near []string
			for l := range strings.Lines(body) {
				if strings.HasPrefix(l, name) {
					near = append(near, l)
				}
			}
			t.Errorf("no line %s among\n%s", line, strings.Join(near, ""))
		}
	}
}

func device(uuid, id string, healthy bool) resource.Device {
	return resource.Device{
		ID: id, UUID: uuid, Healthy: healthy, PCIBusID: "0000:1b:00.0", Model: "NVIDIA H100", NUMANode: 1,
	}
}

func state(devices ...resource.Device) node.State {
	return node.State{Resources: []resource.Resource{{Name: "nvidia.com/gpu", Devices: devices}}}
}

func TestCountersBeginAtZero(t *testing.T) {
	m := New(BuildInfo{"1.2.3", "abc", "go1.26"})
	m.Advertised(state())
	expect(t, m,
		`gpu_cdi_plugin_build_info{goversion="go1.26",revision="abc",version="1.2.3"} 1`,
		`gpu_cdi_plugin_registrations_total{resource="nvidia.com/gpu",result="success"} 0`,
		`gpu_cdi_plugin_registrations_total{resource="nvidia.com/gpu",result="error"} 0`,
		`gpu_cdi_plugin_stream_connected{resource="nvidia.com/gpu"} 0`,
		`gpu_cdi_plugin_stream_reconnects_total{resource="nvidia.com/gpu"} 0`,
		`gpu_cdi_plugin_allocations_total{resource="nvidia.com/gpu",result="OK"} 0`,
		`gpu_cdi_plugin_allocate_duration_seconds_count{resource="nvidia.com/gpu"} 0`,
		`gpu_cdi_plugin_devices{health="healthy",resource="nvidia.com/gpu"} 0`,
		`gpu_cdi_plugin_reconciles_total{result="error"} 0`,
		`gpu_cdi_plugin_spec_writes_total 0`,
	)
}

func TestThePluginIsObserved(t *testing.T) {
	m := New(BuildInfo{})
	const r = "nvidia.com/gpu"
	m.Registered(r, errors.New("refused"))
	m.Registered(r, nil)
	m.Watched(r, true)
	m.Watched(r, false)
	expect(t, m, `gpu_cdi_plugin_stream_connected{resource="nvidia.com/gpu"} 0`)
	m.Watched(r, true)
	m.Allocated(r, codes.OK, 4, 60*time.Microsecond)
	m.Allocated(r, codes.NotFound, 2, time.Millisecond)
	expect(t, m,
		`gpu_cdi_plugin_registrations_total{resource="nvidia.com/gpu",result="error"} 1`,
		`gpu_cdi_plugin_registrations_total{resource="nvidia.com/gpu",result="success"} 1`,
		`gpu_cdi_plugin_stream_connected{resource="nvidia.com/gpu"} 1`,
		`gpu_cdi_plugin_stream_reconnects_total{resource="nvidia.com/gpu"} 1`,
		`gpu_cdi_plugin_allocations_total{resource="nvidia.com/gpu",result="OK"} 1`,
		`gpu_cdi_plugin_allocations_total{resource="nvidia.com/gpu",result="NotFound"} 1`,
		`gpu_cdi_plugin_allocated_devices_total{resource="nvidia.com/gpu"} 4`,
		`gpu_cdi_plugin_allocate_duration_seconds_bucket{resource="nvidia.com/gpu",le="0.0001"} 1`,
	)
}

func TestTheDRADriverIsObserved(t *testing.T) {
	m := New(BuildInfo{})
	if text := scrape(t, m); strings.Contains(text, "_dra_") {
		t.Error("a plugin without the driver has its metrics")
	}
	prepared := 3
	m.AddClaims(func() int { return prepared })
	expect(t, m,
		`gpu_cdi_plugin_dra_prepared_claims 3`,
		`gpu_cdi_plugin_dra_requests_total{operation="prepare",result="error"} 0`,
		`gpu_cdi_plugin_dra_requests_total{operation="unprepare",result="success"} 0`,
		`gpu_cdi_plugin_dra_request_duration_seconds_count{operation="unprepare"} 0`,
		`gpu_cdi_plugin_dra_slice_writes_total{result="error"} 0`,
	)
	m.ClaimHandled("prepare", nil, 2*time.Millisecond)
	m.ClaimHandled("prepare", errors.New("held"), time.Millisecond)
	m.SliceWritten(nil)
	m.SliceWritten(errors.New("forbidden"))
	expect(t, m,
		`gpu_cdi_plugin_dra_requests_total{operation="prepare",result="success"} 1`,
		`gpu_cdi_plugin_dra_requests_total{operation="prepare",result="error"} 1`,
		`gpu_cdi_plugin_dra_request_duration_seconds_bucket{operation="prepare",le="0.001"} 1`,
		`gpu_cdi_plugin_dra_request_duration_seconds_bucket{operation="prepare",le="0.0025"} 2`,
		`gpu_cdi_plugin_dra_slice_writes_total{result="success"} 1`,
		`gpu_cdi_plugin_dra_slice_writes_total{result="error"} 1`,
	)
	m.Clear() // another instance has them now
	expect(t, m, `gpu_cdi_plugin_dra_prepared_claims 0`)
}

func TestReconciliationsAreObserved(t *testing.T) {
	m := New(BuildInfo{})
	m.Reconciled(3*time.Millisecond, true, nil)
	expect(t, m, `gpu_cdi_plugin_spec_stale 0`, `gpu_cdi_plugin_spec_writes_total 1`,
		`gpu_cdi_plugin_spec_generation_duration_seconds_bucket{le="0.005"} 1`)
	if strings.Contains(scrape(t, m), "gpu_cdi_plugin_spec_last_success_timestamp_seconds 0\n") {
		t.Error("the time of the last success is not set")
	}
	m.Reconciled(time.Second, false, errors.New("no driver"))
	expect(t, m, `gpu_cdi_plugin_spec_stale 1`, `gpu_cdi_plugin_reconciles_total{result="error"} 1`)
}

func TestDevicesAreCountedByHealth(t *testing.T) {
	m := New(BuildInfo{})
	advertise := func(a, b bool) {
		m.Advertised(state(device("GPU-a", "GPU-a::0", a), device("GPU-a", "GPU-a::1", a), device("GPU-b", "GPU-b", b)))
	}
	advertise(true, false)
	expect(t, m,
		`gpu_cdi_plugin_devices{health="healthy",resource="nvidia.com/gpu"} 2`,
		`gpu_cdi_plugin_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`,
		`gpu_cdi_plugin_device_info{mig_profile="",numa_node="1",pci_bus_id="0000:1b:00.0",product="NVIDIA H100",`+
			`replicas="2",resource="nvidia.com/gpu",uuid="GPU-a"} 1`,
		`gpu_cdi_plugin_device_health_transitions_total{to="unhealthy",uuid="GPU-a"} 0`,
	)
	advertise(false, true)
	expect(t, m,
		`gpu_cdi_plugin_device_health_transitions_total{to="unhealthy",uuid="GPU-a"} 1`,
		`gpu_cdi_plugin_device_health_transitions_total{to="healthy",uuid="GPU-b"} 1`,
	)
	m.Advertised(state(device("GPU-b", "GPU-b", true)))
	if strings.Contains(scrape(t, m), "GPU-a") {
		t.Error("a device that is gone still has series")
	}
}

// XIDs have a code, other events a kind.
func TestEventsAreCounted(t *testing.T) {
	m := New(BuildInfo{})
	for _, kind := range []gpu.EventKind{gpu.EventXID, gpu.EventECC, gpu.EventMIG, gpu.EventECC} {
		m.Event(gpu.Event{GPU: "GPU-a", Kind: kind, XID: 31})
	}
	expect(t, m,
		`gpu_cdi_plugin_gpu_xids_total{uuid="GPU-a",xid="31"} 1`,
		`gpu_cdi_plugin_gpu_events_total{event="uncorrected-ecc",uuid="GPU-a"} 2`,
		`gpu_cdi_plugin_gpu_events_total{event="mig",uuid="GPU-a"} 1`,
	)
	if text := scrape(t, m); strings.Contains(text, `event="xid"`) {
		t.Error("an XID is counted twice")
	}
}

// A GPU that was taken out is no reason for an alarm.
func TestTheEventsOfAGPUThatIsGoneAreNotMissed(t *testing.T) {
	m := New(BuildInfo{})
	advertise := func(uuids ...string) {
		s := state()
		s.Health = map[string]health.Status{}
		for _, uuid := range uuids {
			s.Health[uuid] = health.Status{State: health.Healthy}
		}
		m.Advertised(s)
	}
	m.EventSource("GPU-a", false)
	m.EventSource("GPU-b", true)
	advertise("GPU-a", "GPU-b", "MIG-c")
	expect(t, m, `gpu_cdi_plugin_gpu_events_received{uuid="GPU-a"} 0`,
		`gpu_cdi_plugin_gpu_events_received{uuid="GPU-b"} 1`)
	advertise("GPU-b")
	if text := scrape(t, m); strings.Contains(text, "GPU-a") || strings.Contains(text, "received{uuid=\"MIG-c") {
		t.Error("a GPU that is gone, or a MIG device, has a series")
	}
	advertise("GPU-a")
	expect(t, m, `gpu_cdi_plugin_gpu_events_received{uuid="GPU-a"} 0`)
}

func TestNoScrapeSeesAPartOfTheDevices(t *testing.T) {
	m := New(BuildInfo{})
	advertised := state(device("GPU-a", "GPU-a", true), device("GPU-b", "GPU-b", true))
	m.Advertised(advertised)
	done := make(chan struct{})
	var advertising sync.WaitGroup
	advertising.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				m.Advertised(advertised)
			}
		}
	})
	for range 100 {
		expect(t, m, `gpu_cdi_plugin_devices{health="healthy",resource="nvidia.com/gpu"} 2`)
	}
	close(done)
	advertising.Wait()
}

// A GPU whose UUID is unknown is not advertised; it is identified by its index and PCI address.
func TestUnreadableGPUsAreCounted(t *testing.T) {
	m := New(BuildInfo{})
	s := state(device("GPU-a", "GPU-a", true))
	s.Snapshot = &gpu.Snapshot{Devices: []gpu.Device{
		{Index: 0, UUID: "GPU-a", PCIBusID: "0000:1b:00.0"},
		{Index: 1, PCIBusID: "0000:43:00.0", Error: "does not answer"},
	}}
	m.Advertised(s)
	expect(t, m,
		`gpu_cdi_plugin_gpu_readable{index="0",pci_bus_id="0000:1b:00.0",uuid="GPU-a"} 1`,
		`gpu_cdi_plugin_gpu_readable{index="1",pci_bus_id="0000:43:00.0",uuid=""} 0`,
	)
}

func TestHealthAndReadiness(t *testing.T) {
	fail := func() error { return errors.New("nvidia.com/gpu is not connected") }
	cases := map[string]struct {
		checks       Checks
		method, path string
		status       int
		body         string
	}{
		"healthy": {Checks{Healthy: succeed, Ready: fail}, "GET", "/healthz", 200, "ok\n"},
		"not healthy": {
			Checks{Healthy: fail, Ready: succeed}, "GET", "/healthz", 503, "nvidia.com/gpu is not connected\n",
		},
		"ready": {Checks{Healthy: fail, Ready: succeed}, "GET", "/readyz", 200, "ok\n"},
		"ready, with remarks": {
			Checks{Healthy: fail, Ready: succeed, Remarks: func() []string { return []string{"one device is lost"} }},
			"GET", "/readyz", 200, "ok\none device is lost\n",
		},
		"not ready": {
			Checks{Healthy: succeed, Ready: fail}, "GET", "/readyz", 503, "nvidia.com/gpu is not connected\n",
		},
		"any other path": {Checks{Healthy: succeed, Ready: succeed}, "GET", "/", 404, "404 page not found\n"},
		"not ready, and something else is wrong": {
			Checks{Ready: fail, Remarks: func() []string { return []string{"one device is lost"} }},
			"GET", "/readyz", 503, "nvidia.com/gpu is not connected\none device is lost\n",
		},
		"texts of others": {
			Checks{
				Ready:   func() error { return errors.New("pod \x1b[31mp") },
				Remarks: func() []string { return []string{"pod \u009b2J\nok"} },
			},
			"GET", "/readyz", 503, "pod \\x1b[31mp\npod \\u009b2J; ok\n",
		},
		"any other method": {Checks{Healthy: succeed, Ready: succeed}, "POST", "/readyz", 405, "Method Not Allowed\n"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			status, body := get(t, New(BuildInfo{}).handler(c.checks), c.method, c.path)
			if status != c.status || body != c.body {
				t.Errorf("%d %q, want %d %q", status, body, c.status, c.body)
			}
		})
	}
}

func TestRemarksAreCounted(t *testing.T) {
	list := []string{"no nvidia-uvm", "GPU 1 is left out"}
	handler := New(BuildInfo{}).handler(Checks{Healthy: succeed, Ready: succeed, Remarks: func() []string { return list }})
	for _, want := range []string{"gpu_cdi_plugin_remarks 2\n", "gpu_cdi_plugin_remarks 0\n"} {
		if _, body := get(t, handler, http.MethodGet, "/metrics"); !strings.Contains(body, want) {
			t.Errorf("/metrics lacks %q", want)
		}
		list = nil
	}
}

// Requests that take long to collect do not add up.
func TestScrapesAreBounded(t *testing.T) {
	m := New(BuildInfo{})
	handler := m.handler(Checks{Healthy: succeed, Ready: succeed})
	m.mu.Lock()
	statuses := make(chan int)
	for range maxScrapes + 1 {
		go func() {
			status, _ := get(t, handler, http.MethodGet, "/metrics")
			statuses <- status
		}()
	}
	if status := <-statuses; status != http.StatusServiceUnavailable {
		t.Errorf("status %d while %d requests wait", status, maxScrapes)
	}
	m.mu.Unlock()
	for range maxScrapes {
		if status := <-statuses; status != http.StatusOK {
			t.Errorf("status %d", status)
		}
	}
}

func TestTheServerServesUntilItsContextEnds(t *testing.T) {
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	m := New(BuildInfo{})
	checks := Checks{Healthy: succeed, Ready: succeed}
	s, err := m.Listen(t.Context(), "127.0.0.1:0", checks, log)
	testenv.Must(t, err)
	if _, err := m.Listen(t.Context(), s.Address(), checks, log); !errors.Is(err, ErrListen) {
		t.Errorf("listen on an address in use: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.Address()+"/healthz", nil)
	testenv.Must(t, err)
	answer, err := http.DefaultClient.Do(request)
	testenv.Must(t, err)
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil || string(body) != "ok\n" {
		t.Errorf("%q, %v", body, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if c, err := net.Dial("tcp", s.Address()); err == nil {
		_ = c.Close()
		t.Error("the server still listens")
	}
}

func TestTheProcessIsMeasuredOnce(t *testing.T) {
	body := scrape(t, New(BuildInfo{}))
	for _, name := range []string{"go_goroutines", "process_open_fds", "process_resident_memory_bytes"} {
		if n := strings.Count(body, "\n"+name+" "); n != 1 {
			t.Errorf("%d lines of %s, want 1", n, name)
		}
	}
}
