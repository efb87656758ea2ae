// Package plugintest has a device plugin in memory, for tests and measurements of device managers. It serves API
// v1beta1 and pluginregistration/v1 on a real socket, and can be made to misbehave.
//
//	p := plugintest.New("example.com/gpu", plugintest.Devices(8)...)
//	err := p.Serve(filepath.Join(dir, "gpu.sock"))
//	err = p.Register(ctx, filepath.Join(dir, "kubelet.sock"))
//	defer p.Stop()
//
// In the plugin watcher's directory, Serve is enough: the manager calls GetInfo.
package plugintest

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Behaviour says how a plugin responds. If a function is nil, the response is immediate and without an error. Hang
// never responds.
type Behaviour struct {
	// Options is the response to GetDevicePluginOptions; nil means no options.
	Options *v1beta1.DevicePluginOptions
	// GetOptions runs before GetDevicePluginOptions answers.
	GetOptions func(context.Context) error
	// Watch runs when a ListAndWatch stream begins, before the first list. An error ends the stream.
	Watch func(context.Context) error
	// Allocate returns the response for one container; nil omits it. If the function is nil, the response sets DEVICES
	// to the number of IDs.
	Allocate func(ctx context.Context, ids []string) (*v1beta1.ContainerAllocateResponse, error)
	// Preferred returns the response for one container. If it is nil, the first available devices are preferred.
	Preferred func(context.Context, *v1beta1.ContainerPreferredAllocationRequest) ([]string, error)
	// PreStart runs before PreStartContainer answers.
	PreStart func(ctx context.Context, ids []string) error
	// Info returns the response to GetInfo. If it is nil, the response is that of a device plugin at the same socket.
	Info func(context.Context) (*registration.PluginInfo, error)
	// Notify runs before NotifyRegistrationStatus answers.
	Notify func(context.Context, *registration.RegistrationStatus) error
}

// Hang waits until the caller cancels the call or its deadline ends.
func Hang(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// Calls are the numbers of calls that a plugin has received, answered or not. Ended counts the ListAndWatch streams
// that have ended.
type Calls struct {
	Options, Watch, Ended, Allocate, Preferred, PreStart, Info, Notify int
}

// Plugin is a device plugin of one resource. Its methods may be called concurrently.
type Plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	registration.UnimplementedRegistrationServer

	// Resource is the name of the resource.
	Resource string

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change
	b       Behaviour
	list    *v1beta1.ListAndWatchResponse
	version int   // of the list
	fail    error // ends all streams
	calls   Calls
	socket  string
	server  *grpc.Server
	serving sync.WaitGroup
}

// New returns a plugin that does not serve yet.
func New(resource string, devices ...*v1beta1.Device) *Plugin {
	p := &Plugin{Resource: resource, changed: make(chan struct{})}
	p.SetDevices(devices...)
	return p
}

// Devices returns n healthy devices named gpu-0000 and so on.
func Devices(n int) []*v1beta1.Device {
	devices := make([]*v1beta1.Device, n)
	for i := range devices {
		devices[i] = Device(fmt.Sprintf("gpu-%04d", i), true)
	}
	return devices
}

// Device returns a device. Without NUMA nodes it has no topology.
func Device(id string, healthy bool, numa ...int64) *v1beta1.Device {
	d := &v1beta1.Device{ID: id, Health: v1beta1.Unhealthy}
	if healthy {
		d.Health = v1beta1.Healthy
	}
	for _, n := range numa {
		if d.Topology == nil {
			d.Topology = &v1beta1.TopologyInfo{}
		}
		d.Topology.Nodes = append(d.Topology.Nodes, &v1beta1.NUMANode{ID: n})
	}
	return d
}

// change changes the plugin and wakes everything that waits for a change.
func (p *Plugin) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	close(p.changed)
	p.changed = make(chan struct{})
}

// Behave replaces the behaviour for calls that begin later.
func (p *Plugin) Behave(b Behaviour) { p.change(func() { p.b = b }) }

// SetDevices replaces the list of devices. Open streams send the newest list; a slow stream may skip lists.
func (p *Plugin) SetDevices(devices ...*v1beta1.Device) {
	p.change(func() {
		p.list = &v1beta1.ListAndWatchResponse{Devices: devices}
		p.version++
	})
}

// EndStreams ends the open ListAndWatch streams, and later ones at once, with an error. The plugin continues to serve.
// Nil stops ending streams.
func (p *Plugin) EndStreams(err error) { p.change(func() { p.fail = err }) }

// Calls returns the numbers of calls so far.
func (p *Plugin) Calls() Calls {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls
}

// WaitCalls waits until fit accepts the numbers of calls.
func (p *Plugin) WaitCalls(ctx context.Context, fit func(Calls) bool) error {
	for {
		p.mu.Lock()
		calls, changed := p.calls, p.changed
		p.mu.Unlock()
		if fit(calls) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for calls of %s, which were %+v: %w", p.Resource, calls, ctx.Err())
		}
	}
}

// Serve listens on a socket and serves until Stop. It does not register.
func (p *Plugin) Serve(socket string) error {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.MaxSendMsgSize(1 << 30))
	v1beta1.RegisterDevicePluginServer(server, p)
	registration.RegisterRegistrationServer(server, p)
	p.change(func() { p.server, p.socket = server, socket })
	p.serving.Go(func() { _ = server.Serve(l) })
	return nil
}

// Stop ends all streams and connections at once and removes the socket. Serve can be called again.
func (p *Plugin) Stop() {
	p.mu.Lock()
	server := p.server
	p.server = nil
	p.mu.Unlock()
	if server != nil {
		server.Stop()
		p.serving.Wait()
	}
}

// Register registers with the manager at a socket, with the file name of the plugin's own socket.
func (p *Plugin) Register(ctx context.Context, manager string) error {
	p.mu.Lock()
	request := &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: filepath.Base(p.socket), ResourceName: p.Resource, Options: p.b.Options,
	}
	p.mu.Unlock()
	return Register(ctx, manager, request)
}

// Register sends any registration to the manager at a socket. Errors are those of gRPC.
func Register(ctx context.Context, manager string, request *v1beta1.RegisterRequest) error {
	conn, err := grpc.NewClient("unix:"+manager, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = v1beta1.NewRegistrationClient(conn).Register(ctx, request)
	return err
}
