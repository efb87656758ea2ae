package metrics_test

import (
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/metrics"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/pod"
	"gpu-cdi-plugin/manager/podresources"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// node is a device manager with its three sockets.
type node struct {
	*testing.T
	dir string
	m   *manager.Manager
}

// start starts the node. Resources are gone when their plugins were away for the grace period.
func start(t *testing.T, grace time.Duration) *node {
	t.Helper()
	n := &node{T: t, dir: t.TempDir()}
	observed := metrics.New()
	o := manager.Options{
		Dir: n.path("plugins"), RegistryDir: n.path("registry"), StateFile: n.path("state"), Observer: observed,
		Log: slog.New(slog.DiscardHandler),
	}
	o.Deadlines.Grace = grace
	var err error
	if n.m, err = manager.New(o); err != nil {
		t.Fatal(err)
	}
	observed.ObserveSockets(n.m.PluginSockets)
	requests, err := api.Listen(t.Context(), n.path("api"), unixsocket.OwnerOnly, nil)
	testenv.Must(t, err)
	calls, err := podresources.Listen(t.Context(), n.path("pods"), unixsocket.OwnerOnly)
	testenv.Must(t, err)
	server := &api.Server{Manager: n.m, ParsePod: pod.Parse, Metrics: observed.Text, Log: o.Log}
	pods := &podresources.Server{Manager: n.m, OnCall: observed.Called}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 3)
	go func() { done <- n.m.Run(ctx) }()
	go func() { done <- server.Run(ctx, requests) }()
	go func() { done <- pods.Run(ctx, calls) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, <-done, <-done); err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

// plugin serves a plugin at a path, and waits until all devices can be allocated.
func (n *node) plugin(path, resource string, b plugintest.Behaviour, devices int) *plugintest.Plugin {
	n.Helper()
	p := plugintest.New(resource, plugintest.Devices(devices)...)
	p.Behave(b)
	testenv.Must(n, p.Serve(path))
	n.Cleanup(p.Stop)
	if filepath.Dir(path) == n.path("plugins") {
		testenv.Must(n, p.Register(n.Context(), n.path("plugins/kubelet.sock")))
	}
	n.until("the devices of "+resource, func() bool { return n.m.Counts()[resource].Allocatable == devices })
	return p
}

// until waits for something that an event of the manager announces.
func (n *node) until(what string, happened func() bool) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.Context(), time.Minute)
	defer cancel()
	events := n.m.Watch(ctx)
	for !happened() {
		if _, open := <-events; !open {
			n.Fatal("these did not come:", what)
		}
	}
}

func (n *node) admit(name, resource string, count int) error {
	_, err := n.m.Admit(n.Context(), model.Pod{UID: name, Namespace: "default", Name: name, Containers: []model.Container{
		{Name: "main", Limits: map[string]int{resource: count}},
	}}, model.Caller{})
	return err
}

// Durations depend on the machine.
var durations = regexp.MustCompile(`(?m)^(\S+_(sum\{.*\}|bucket\{.*le="[0-9.]+"\})) .*$`)

// metrics are those that the API serves, without durations.
func (n *node) metrics() string {
	n.Helper()
	client := unixsocket.NewHTTPClient(n.path("api"), 10*time.Second)
	answer, err := client.Get("http://manager/metrics")
	testenv.Must(n, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		n.Fatalf("%s, %v, %s", answer.Status, err, text)
	}
	return strings.ReplaceAll(durations.ReplaceAllString(string(text), "$1 DURATION"), n.dir, "DIR")
}

// compare compares the metrics with a file.
func (n *node) compare(golden string) {
	n.Helper()
	path, got := filepath.Join("testdata", golden), n.metrics()
	if *update {
		testenv.Must(n, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	testenv.Must(n, err)
	if diff := cmp.Diff(string(want), got); diff != "" {
		n.Errorf("the metrics (-want +got):\n%s", diff)
	}
}

func TestMetrics(t *testing.T) {
	n := start(t, 0)
	if text := n.metrics(); text != "" {
		t.Errorf("before the first call there is %q", text)
	}
	broken := errors.New("broken")
	p := n.plugin(n.path("plugins/gpu.sock"), "example.com/gpu", plugintest.Behaviour{}, 4)
	if err := p.Register(t.Context(), n.path("plugins/kubelet.sock")); err != nil { // it registers again
		t.Fatal(err)
	}
	n.plugin(n.path("plugins/nic.sock"), "example.com/nic", plugintest.Behaviour{
		Allocate: func(context.Context, []string) (*v1beta1.ContainerAllocateResponse, error) { return nil, broken },
	}, 1)
	watched := n.path("registry/a b.sock")
	n.plugin(watched, "example.com/watched", plugintest.Behaviour{}, 1)
	testenv.Eventually(t, "the registration by the plugin watcher", func() bool { return n.m.PluginSockets()[watched] })
	n.refused()
	for _, name := range []string{"a", "b"} {
		testenv.Must(t, n.admit(name, "example.com/gpu", 1))
	}
	if err := n.admit("c", "example.com/nic", 1); !strings.Contains(err.Error(), broken.Error()) {
		t.Fatal(err)
	}
	if err := n.admit("d", "example.com/gpu", 9); err == nil { // without a call of the plugin
		t.Fatal("more devices than there are")
	}
	n.callPodResources()
	n.compare("metrics.txt")
}

// refused sends registrations that are not accepted, under names that have no series then.
func (n *node) refused() {
	n.Helper()
	failing := plugintest.New("example.com/failing", plugintest.Devices(1)...)
	failing.Behave(plugintest.Behaviour{GetOptions: func(context.Context) error { return errors.New("no options") }})
	testenv.Must(n, failing.Serve(n.path("plugins/failing.sock")))
	n.Cleanup(failing.Stop)
	for _, r := range []*v1beta1.RegisterRequest{
		{Version: "v1beta1", ResourceName: "example.com/failing", Endpoint: "failing.sock"},
		{Version: "v1beta1", ResourceName: "not-extended", Endpoint: "gpu.sock"},
		{Version: "v1alpha1", ResourceName: "example.com/old", Endpoint: "gpu.sock"},
		{Version: "v1beta1", ResourceName: "example.com/outside", Endpoint: "../gpu.sock"},
	} {
		if err := plugintest.Register(n.Context(), n.path("plugins/kubelet.sock"), r); err == nil {
			n.Fatalf("%v is accepted", r)
		}
	}
}

// callPodResources calls each method of PodResources, Get of a pod that is there and of one that is not.
func (n *node) callPodResources() {
	n.Helper()
	conn, err := grpc.NewClient("unix:"+n.path("pods"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(n, err)
	defer conn.Close()
	current, alpha := v1.NewPodResourcesListerClient(conn), v1alpha1.NewPodResourcesListerClient(conn)
	_, list := current.List(n.Context(), &v1.ListPodResourcesRequest{})
	_, again := current.List(n.Context(), &v1.ListPodResourcesRequest{})
	_, get := current.Get(n.Context(), &v1.GetPodResourcesRequest{PodNamespace: "default", PodName: "a"})
	_, unknown := current.Get(n.Context(), &v1.GetPodResourcesRequest{PodNamespace: "default", PodName: "x"})
	_, allocatable := current.GetAllocatableResources(n.Context(), &v1.AllocatableResourcesRequest{})
	_, old := alpha.List(n.Context(), &v1alpha1.ListPodResourcesRequest{})
	if err := errors.Join(list, again, get, allocatable, old); err != nil || unknown == nil {
		n.Fatal(err, unknown)
	}
}

// A plugin can register any number of names, one after the other: none of them leaves series.
func TestAResourceThatIsGoneHasNoSeries(t *testing.T) {
	n := start(t, time.Millisecond)
	for _, resource := range []string{"example.com/a", "example.com/b"} {
		p := n.plugin(n.path("plugins/p.sock"), resource, plugintest.Behaviour{}, 1)
		testenv.Must(t, n.admit(resource, resource, 1))
		if text := n.metrics(); !strings.Contains(text, `registration_total{resource_name="`+resource+`"} 1`) ||
			!strings.Contains(text, `_seconds_count{resource_name="`+resource+`"} 1`) {
			t.Errorf("while %s is there:\n%s", resource, text)
		}
		events := n.m.Watch(t.Context())
		p.Stop()
		for e := range events {
			if e.Type == manager.ResourceRemoved {
				break
			}
		}
		if text := n.metrics(); text != "" {
			t.Errorf("when %s is gone:\n%s", resource, text)
		}
	}
}

// Names of files are any bytes, and values of labels are UTF-8.
func TestSocketsOfAnyName(t *testing.T) {
	m := metrics.New()
	m.ObserveSockets(func() map[string]bool {
		return map[string]bool{"/r/\xff": true, "/r/\xfe": false, "/r/\"\n\\": false}
	})
	text, err := m.Text()
	want := `# HELP plugin_manager_total_plugins [ALPHA] Number of plugins in Plugin Manager
# TYPE plugin_manager_total_plugins gauge
plugin_manager_total_plugins{socket_path="/r/\"\n\\",state="desired_state_of_world"} 1
plugin_manager_total_plugins{socket_path="/r/` + "\uFFFD" + `",state="actual_state_of_world"} 1
plugin_manager_total_plugins{socket_path="/r/` + "\uFFFD" + `",state="desired_state_of_world"} 2
`
	if diff := cmp.Diff(want, string(text)); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}
