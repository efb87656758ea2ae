package devicemanager

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	basemetrics "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
	kubeletmetrics "k8s.io/kubernetes/pkg/kubelet/metrics"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"
	pluginmetrics "k8s.io/kubernetes/pkg/kubelet/pluginmanager/metrics"

	"gpu-cdi-plugin/manager/metrics"
	"gpu-cdi-plugin/test/lib/testenv"
)

// kubeletMetrics are those of the kubelet that the manager has too, after some calls.
func kubeletMetrics(t *testing.T) string {
	t.Helper()
	counters := []*basemetrics.CounterVec{
		kubeletmetrics.DevicePluginRegistrationCount,
		kubeletmetrics.PodResourcesEndpointRequestsTotalCount,
		kubeletmetrics.PodResourcesEndpointRequestsListCount, kubeletmetrics.PodResourcesEndpointErrorsListCount,
		kubeletmetrics.PodResourcesEndpointRequestsGetCount, kubeletmetrics.PodResourcesEndpointErrorsGetCount,
		kubeletmetrics.PodResourcesEndpointRequestsGetAllocatableCount,
		kubeletmetrics.PodResourcesEndpointErrorsGetAllocatableCount,
	}
	durations := kubeletmetrics.DevicePluginAllocationDuration
	registry := basemetrics.NewKubeRegistry()
	registry.MustRegister(durations)
	durations.Reset()
	for i, c := range counters {
		registry.MustRegister(c)
		c.Reset()
		if i == 0 {
			c.WithLabelValues(gpuName).Inc()
			continue
		}
		c.WithLabelValues("v1").Inc()
	}
	kubeletmetrics.PodResourcesEndpointRequestsTotalCount.WithLabelValues("v1").Add(2)
	kubeletmetrics.PodResourcesEndpointRequestsTotalCount.WithLabelValues("v1alpha1").Inc()
	durations.WithLabelValues(gpuName).Observe(0.5)

	plugins, sockets := cache.NewActualStateOfWorld(), cache.NewDesiredStateOfWorld()
	pluginmetrics.Register(plugins, sockets)
	for _, path := range []string{"/registry/a.sock", "/registry/b.sock"} {
		testenv.Must(t, sockets.AddOrUpdatePlugin(t.Context(), path))
	}
	testenv.Must(t, plugins.AddPlugin(t.Context(), cache.PluginInfo{SocketPath: "/registry/a.sock"}))
	own := regexp.MustCompile(`(?m)^.*plugin_manager_total_plugins.*\n`)
	others := own.FindAllString(text(legacyregistry.Handler()), -1)
	return text(basemetrics.HandlerFor(registry, basemetrics.HandlerOpts{})) + strings.Join(others, "")
}

// text is what a handler of metrics answers.
func text(h http.Handler) string {
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return answer.Body.String()
}

// alone is set in the process that makes nothing but the kubelet's metrics.
const alone = "GPU_TEST_KUBELET_METRICS"

// The manager's metrics are the kubelet's, byte for byte. The kubelet's are made in a process of their own: the plugin
// manager that is made first in a process is the one whose sockets are counted, and other tests make some.
func TestMetricsAreTheKubelets(t *testing.T) {
	if path := os.Getenv(alone); path != "" {
		testenv.Must(t, os.WriteFile(path, []byte(kubeletMetrics(t)), 0o600))
		return
	}
	path := filepath.Join(t.TempDir(), "metrics")
	process := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	process.Env = append(os.Environ(), alone+"="+path)
	if output, err := process.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	want, err := os.ReadFile(path)
	testenv.Must(t, err)
	m := metrics.New()
	m.Registered(gpuName)
	m.Allocated(gpuName, 500*time.Millisecond)
	for _, name := range []string{
		podresourcesv1.PodResourcesLister_List_FullMethodName,
		podresourcesv1.PodResourcesLister_Get_FullMethodName,
		podresourcesv1.PodResourcesLister_GetAllocatableResources_FullMethodName,
	} {
		m.Called(name, errors.New("broken"))
	}
	m.Called(v1alpha1.PodResourcesLister_List_FullMethodName, nil)
	m.ObserveSockets(func() map[string]bool {
		return map[string]bool{"/registry/a.sock": true, "/registry/b.sock": false}
	})
	got, err := m.Text()
	testenv.Must(t, err)
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("the kubelet's and the manager's (-kubelet +manager):\n%s", diff)
	}
}
