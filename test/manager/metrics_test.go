package manager

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The program joins the metrics with what they measure.
func TestTheProgramServesMetrics(t *testing.T) {
	const resource = "example.com/gpu"
	p := newProgram(t)
	p.start()
	for _, dir := range []string{p.plugins, filepath.Join(p.dir, "registry")} {
		plugin := plugintest.New(resource, plugintest.Devices(1)...)
		testenv.Must(t, plugin.Serve(filepath.Join(dir, "gpu.sock")))
		t.Cleanup(plugin.Stop)
		if dir != p.plugins {
			continue
		}
		testenv.Must(t, plugin.Register(t.Context(), filepath.Join(p.plugins, "kubelet.sock")))
	}
	p.await("the devices can be allocated", func() bool { return p.allocatable(resource) == 1 })
	if _, err := p.admit(t.Context(), "a", resource, 1); err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix:"+filepath.Join(p.dir, "pod-resources", "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	defer conn.Close()
	pods := podresources.NewPodResourcesListerClient(conn)
	if _, err := pods.List(t.Context(), &podresources.ListPodResourcesRequest{}); err != nil {
		t.Fatal(err)
	}
	for _, series := range []string{
		`kubelet_device_plugin_registration_total{resource_name="example.com/gpu"} 2`,
		`kubelet_device_plugin_alloc_duration_seconds_count{resource_name="example.com/gpu"} 1`,
		`kubelet_pod_resources_endpoint_requests_list{server_api_version="v1"} 1`,
		`plugin_manager_total_plugins{socket_path="` + filepath.Join(p.dir, "registry", "gpu.sock") +
			`",state="actual_state_of_world"} 1`,
	} {
		p.await("the metrics have "+series, func() bool { return strings.Contains(p.metrics(), series+"\n") })
	}
}

// metrics are those that the program serves.
func (p *program) metrics() string {
	p.Helper()
	client := unixsocket.NewHTTPClient(filepath.Join(p.dir, "api", "manager.sock"), 10*time.Second)
	answer, err := client.Get("http://manager/metrics")
	testenv.Must(p, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		p.Fatalf("%s, %v, %s", answer.Status, err, text)
	}
	return string(text)
}
