package podresources_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"

	client "gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/podresources"
	"gpu-cdi-plugin/test/lib/testenv"
)

type fake struct {
	pods      []model.Placement
	resources []manager.Resource
}

func (f fake) Pods() []model.Placement       { return f.pods }
func (f fake) Resources() []manager.Resource { return f.resources }

// serve serves until the test ends, and returns the socket and a connection to it.
func serve(t *testing.T, s podresources.Server) (socket string, conn *grpc.ClientConn) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "pods", "kubelet.sock") // with longer names, paths are too long for a socket
	l, err := podresources.Listen(t.Context(), socket, unixsocket.OwnerOnly)
	testenv.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket is left behind (%v)", err)
		}
	})
	conn, err = grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return socket, conn
}

// node has a pod with each kind of container, one without devices, and one that was made again under its name.
var node = fake{
	pods: []model.Placement{
		{
			Pod: model.Pod{
				UID: "1", Namespace: "default", Name: "z",
				InitContainers: []model.Container{
					{Name: "init"},
					{Name: "sidecar", Sidecar: true},
					{Name: "done", Sidecar: true},
				},
				Containers: []model.Container{{Name: "main"}, {Name: "idle"}},
			},
			Allocations: []model.Allocation{
				{Container: "init", Resource: "a.b/gpu", IDs: []string{"g0", "g1"}},
				{Container: "sidecar", Resource: "a.b/gpu", IDs: []string{"g0"}, NUMA: map[string][]int{"g0": {0, 1}}},
				{Container: "done", Resource: "a.b/gpu", IDs: []string{"g9"}},
				{Container: "main", Resource: "a.b/gpu", IDs: []string{"g1", "g2"}, NUMA: map[string][]int{"g2": {1}}},
				{Container: "main", Resource: "a.b/nic", IDs: []string{"n0"}, NUMA: map[string][]int{"n0": {0, 1}}},
			},
			Ended: []string{"init", "done"},
		},
		{Pod: model.Pod{UID: "2", Namespace: "x", Name: "a", Containers: []model.Container{{Name: "c"}}}},
		{
			Pod:         model.Pod{UID: "3", Namespace: "x", Name: "a", Containers: []model.Container{{Name: "new"}}},
			Allocations: []model.Allocation{{Container: "new", Resource: "a.b/gpu", IDs: []string{"g3"}}},
		},
	},
	resources: []manager.Resource{
		{Name: "a.b/gpu", Connected: true, Devices: []manager.Device{
			{ID: "g0", Health: manager.Healthy, NUMA: []int{0, 1}, Pod: "1"},
			{ID: "g1", Health: manager.Healthy},
			{ID: "g2", Health: manager.Healthy, NUMA: []int{}},
			{ID: "g3", Health: manager.Unhealthy},
			{ID: "g4", Health: manager.Unknown, Pod: "1"},
			{ID: "g5", Health: manager.Healthy, Withheld: true},
		}},
		{
			Name:      "a.b/nic",
			Connected: true,
			Devices:   []manager.Device{{ID: "n0", Health: manager.Healthy, NUMA: []int{1}}},
		},
	},
}

func device(resource, id string, numa ...int64) *v1.ContainerDevices {
	d := &v1.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}}
	for _, n := range numa {
		d.Topology = &v1.TopologyInfo{Nodes: []*v1.NUMANode{{ID: n}}}
	}
	return d
}

var wantPods = []*v1.PodResources{
	{Name: "z", Namespace: "default", Containers: []*v1.ContainerResources{
		{Name: "sidecar", Devices: []*v1.ContainerDevices{device("a.b/gpu", "g0", 0), device("a.b/gpu", "g0", 1)}},
		{Name: "done"},
		{Name: "main", Devices: []*v1.ContainerDevices{
			device("a.b/gpu", "g1"), device("a.b/gpu", "g2", 1), device("a.b/nic", "n0", 0), device("a.b/nic", "n0", 1),
		}},
		{Name: "idle"},
	}},
	{Name: "a", Namespace: "x", Containers: []*v1.ContainerResources{{Name: "c"}}},
	{Name: "a", Namespace: "x", Containers: []*v1.ContainerResources{
		{Name: "new", Devices: []*v1.ContainerDevices{device("a.b/gpu", "g3")}},
	}},
}

func TestList(t *testing.T) {
	for name, c := range map[string]struct {
		pods []model.Placement
		want []*v1.PodResources
	}{
		"no pods":                               {nil, nil},
		"sidecars and containers, not the rest": {node.pods, wantPods},
	} {
		t.Run(name, func(t *testing.T) {
			_, conn := serve(t, podresources.Server{Manager: fake{pods: c.pods}})
			got, err := v1.NewPodResourcesListerClient(conn).List(t.Context(), &v1.ListPodResourcesRequest{})
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, got.GetPodResources(), protocmp.Transform()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestGet(t *testing.T) {
	_, conn := serve(t, podresources.Server{Manager: node})
	client := v1.NewPodResourcesListerClient(conn)
	for name, c := range map[string]struct {
		namespace, pod string
		want           *v1.PodResources
		err            string
	}{
		"a pod":                      {"default", "z", wantPods[0], ""},
		"the last one of a name":     {"x", "a", wantPods[2], ""},
		"an unknown pod":             {"default", "y", nil, "pod y in namespace default not found"},
		"a pod of another namespace": {"x", "z", nil, "pod z in namespace x not found"},
		"no names":                   {"", "", nil, "pod  in namespace  not found"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := client.Get(t.Context(), &v1.GetPodResourcesRequest{PodName: c.pod, PodNamespace: c.namespace})
			if text := status.Convert(err).Message(); text != c.err {
				t.Errorf("%q, want %q", text, c.err)
			}
			if diff := cmp.Diff(c.want, got.GetPodResources(), protocmp.Transform()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestGetAllocatableResources(t *testing.T) {
	all := []*v1.ContainerDevices{
		device("a.b/gpu", "g0", 0), device("a.b/gpu", "g0", 1), device("a.b/gpu", "g1"),
		device("a.b/gpu", "g2"), device("a.b/nic", "n0", 1),
	}
	for name, c := range map[string]struct {
		resources []manager.Resource
		want      []*v1.ContainerDevices
	}{
		"no devices": {nil, nil},
		"healthy devices, also those that pods have": {node.resources, all},
	} {
		t.Run(name, func(t *testing.T) {
			_, conn := serve(t, podresources.Server{Manager: fake{resources: c.resources}})
			got, err := v1.NewPodResourcesListerClient(conn).
				GetAllocatableResources(t.Context(), &v1.AllocatableResourcesRequest{})
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, got.GetDevices(), protocmp.Transform()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestV1alpha1List(t *testing.T) {
	_, conn := serve(t, podresources.Server{Manager: node})
	got, err := v1alpha1.NewPodResourcesListerClient(conn).List(t.Context(), &v1alpha1.ListPodResourcesRequest{})
	testenv.Must(t, err)
	device := func(resource, id string) *v1alpha1.ContainerDevices {
		return &v1alpha1.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}}
	}
	want := []*v1alpha1.PodResources{
		{Name: "z", Namespace: "default", Containers: []*v1alpha1.ContainerResources{
			{Name: "main", Devices: []*v1alpha1.ContainerDevices{
				device("a.b/gpu", "g1"), device("a.b/gpu", "g2"), device("a.b/nic", "n0"), device("a.b/nic", "n0"),
			}},
			{Name: "idle"},
		}},
		{Name: "a", Namespace: "x", Containers: []*v1alpha1.ContainerResources{{Name: "c"}}},
		{Name: "a", Namespace: "x", Containers: []*v1alpha1.ContainerResources{
			{Name: "new", Devices: []*v1alpha1.ContainerDevices{device("a.b/gpu", "g3")}},
		}},
	}
	if diff := cmp.Diff(want, got.GetPodResources(), protocmp.Transform()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The limit is that of all clients and methods together.
func TestCallsAboveTheRateAreRejected(t *testing.T) {
	_, conn := serve(t, podresources.Server{Manager: node})
	accepted, rejected := 0, 0
	const calls = 400
	errs := make(chan error)
	start := time.Now()
	for i := range calls { // all at once: one after the other, they may be below the rate on a busy machine
		go func() {
			var err error
			if i%2 == 0 {
				_, err = v1.NewPodResourcesListerClient(conn).List(t.Context(), &v1.ListPodResourcesRequest{})
			} else {
				_, err = v1alpha1.NewPodResourcesListerClient(conn).List(t.Context(), &v1alpha1.ListPodResourcesRequest{})
			}
			errs <- err
		}()
	}
	for range calls {
		err := <-errs
		switch s := status.Convert(err); {
		case err == nil:
			accepted++
		case s.Code() == codes.ResourceExhausted && s.Message() == "rejected by rate limit":
			rejected++
		default:
			t.Fatal(err)
		}
	}
	most := 10 + int(100*time.Since(start).Seconds()) + 1
	if accepted < 10 || accepted > most || rejected == 0 {
		t.Errorf("%d accepted, want 10 to %d, and %d rejected", accepted, most, rejected)
	}
}

// This project's own client of the service sees the devices of each container once.
func TestHoldersReadsTheService(t *testing.T) {
	socket, _ := serve(t, podresources.Server{Manager: node})
	got, err := client.List(t.Context(), socket)
	testenv.Must(t, err)
	for i := range got {
		got[i].ByResource = nil
	}
	want := []client.Holder{
		{Namespace: "default", Pod: "z", Container: "main", Devices: []string{"g1", "g2", "n0"}},
		{Namespace: "default", Pod: "z", Container: "sidecar", Devices: []string{"g0"}},
		{Namespace: "x", Pod: "a", Container: "new", Devices: []string{"g3"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestListen(t *testing.T) {
	listen := func(t *testing.T, path string) (*unixsocket.HTTPListener, error) {
		t.Helper()
		l, err := podresources.Listen(t.Context(), path, unixsocket.OwnerOnly)
		if l != nil {
			t.Cleanup(func() { _ = l.Close() })
		}
		return l, err
	}
	t.Run("the owner alone can connect", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		if _, err := listen(t, path); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Lstat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
			t.Errorf("%v (%v)", info, err)
		}
	})
	t.Run("a socket that no program serves is replaced", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
		testenv.Must(t, err)
		stale.SetUnlinkOnClose(false)
		testenv.Must(t, stale.Close())
		if _, err := listen(t, path); err != nil {
			t.Error(err)
		}
	})
	t.Run("the socket of a program without a lock, as the kubelet, is left alone", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		kubelet, err := net.Listen("unix", path)
		testenv.Must(t, err)
		defer kubelet.Close()
		if _, err := listen(t, path); !errors.Is(err, fileio.ErrHeld) || !strings.Contains(err.Error(), path) {
			t.Error(err)
		}
		if c, err := net.Dial("unix", path); err != nil {
			t.Error(err)
		} else {
			_ = c.Close()
		}
	})
	t.Run("another manager has the lock", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		held, err := fileio.AcquireLock(path + ".lock")
		testenv.Must(t, err)
		defer func() { _ = held.Release() }()
		if _, err := listen(t, path); !errors.Is(err, fileio.ErrHeld) {
			t.Error(err)
		}
	})
	t.Run("a file is left alone", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		testenv.Must(t, os.WriteFile(path, []byte("x"), 0o600))
		if _, err := listen(t, path); err == nil {
			t.Error("no error")
		}
	})
}
