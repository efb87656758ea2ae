package cluster

import (
	"context"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/test/lib/testenv"
)

// foreignDriver is a DRA driver of another project: it has the name of ours, and calls its only device gpu-0, which is
// GPU 0.
type foreignDriver struct {
	drav1.UnimplementedDRAPluginServer
	pluginregistration.UnimplementedRegistrationServer

	h          *holdersTest
	server     *grpc.Server
	once       sync.Once
	registered chan struct{} // closed when the kubelet has
}

const (
	foreignSocket = "/var/lib/kubelet/plugins_registry/foreign-reg.sock"
	foreignSpec   = "/run/cdi/foreign.json"
	foreignCDI    = `{"cdiVersion": "0.5.0", "kind": "example.com/foreign", "devices": [{"name": "0", "containerEdits":
{"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "` + machineRoot + `/dev/nvidia0"}]}}]}`
	foreignDevice = `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: foreign}
spec: {selectors: [{cel: {expression: "device.driver == 'gpu.nvidia.com'"}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: foreign}
spec:
  driver: gpu.nvidia.com
  nodeName: node2
  pool: {name: node2, generation: 1, resourceSliceCount: 1}
  devices: [{name: gpu-0}]
`
)

// startForeignDriver registers the driver with the kubelet of node2, and offers its device to claims of the template
// "foreign".
func startForeignDriver(t testing.TB, h *holdersTest) *foreignDriver {
	t.Helper()
	f := &foreignDriver{h: h, server: grpc.NewServer(), registered: make(chan struct{})}
	drav1.RegisterDRAPluginServer(f.server, f)
	pluginregistration.RegisterRegistrationServer(f.server, f)
	spec := h.node.Host(foreignSpec)
	testenv.Must(t, os.MkdirAll(h.node.Host("/run/cdi"), 0o755), os.WriteFile(spec, []byte(foreignCDI), 0o644))
	listener, err := net.Listen("unix", h.node.Host(foreignSocket))
	testenv.Must(t, err)
	go func() { _ = f.server.Serve(listener) }() // until it is stopped
	select {
	case <-f.registered:
	case <-time.After(patience):
		t.Fatal("the kubelet has not registered the foreign driver")
	}
	h.c.apply(t, foreignDevice)
	h.c.claimTemplateOf(t, "foreign", "foreign", 1)
	return f
}

// stop ends the driver. What it has prepared stays, in the containers and in the kubelet's books.
func (f *foreignDriver) stop(t testing.TB) {
	t.Helper()
	f.server.Stop() // it removes the socket
	f.h.c.kubectl(t, "delete", "deviceclass", "foreign")
	// The kubelet may have removed it.
	f.h.c.kubectl(t, "delete", "resourceslice", "foreign", "--ignore-not-found")
	testenv.Must(t, os.Remove(f.h.node.Host(foreignSpec)))
}

func (f *foreignDriver) GetInfo(
	context.Context, *pluginregistration.InfoRequest,
) (*pluginregistration.PluginInfo, error) {
	return &pluginregistration.PluginInfo{
		Type: pluginregistration.DRAPlugin, Name: "gpu.nvidia.com", Endpoint: foreignSocket,
		SupportedVersions: []string{drav1.DRAPluginService},
	}, nil
}

func (f *foreignDriver) NotifyRegistrationStatus(
	context.Context, *pluginregistration.RegistrationStatus,
) (*pluginregistration.RegistrationStatusResponse, error) {
	f.once.Do(func() { close(f.registered) })
	return &pluginregistration.RegistrationStatusResponse{}, nil
}

func (f *foreignDriver) NodePrepareResources(
	_ context.Context, q *drav1.NodePrepareResourcesRequest,
) (*drav1.NodePrepareResourcesResponse, error) {
	answer := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	for _, claim := range q.GetClaims() {
		answer.Claims[claim.GetUid()] = &drav1.NodePrepareResourceResponse{Devices: []*drav1.Device{{
			PoolName: "node2", DeviceName: "gpu-0", CdiDeviceIds: []string{"example.com/foreign=0"},
		}}}
	}
	return answer, nil
}

func (f *foreignDriver) NodeUnprepareResources(
	_ context.Context, q *drav1.NodeUnprepareResourcesRequest,
) (*drav1.NodeUnprepareResourcesResponse, error) {
	answer := &drav1.NodeUnprepareResourcesResponse{Claims: map[string]*drav1.NodeUnprepareResourceResponse{}}
	for _, claim := range q.GetClaims() {
		answer.Claims[claim.GetUid()] = &drav1.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}
