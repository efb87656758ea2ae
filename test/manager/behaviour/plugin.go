package behaviour

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type (
	response  = v1beta1.ContainerAllocateResponse
	available = v1beta1.ContainerPreferredAllocationRequest
)

// Plugin is a device plugin that does what its functions say. Those that are nil do what a plain plugin would.
type Plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	pluginregistration.UnimplementedRegistrationServer

	Resource string
	// Socket is the path of its socket.
	Socket  string
	Options *v1beta1.DevicePluginOptions

	OnOptions  func(context.Context) error
	OnList     func() error
	OnAllocate func(ctx context.Context, ids []string) (*v1beta1.AllocateResponse, error)
	OnPrefer   func(context.Context, *available) ([]string, error)
	OnPreStart func(ctx context.Context, ids []string) error
	// Info is what the plugin watcher is told. Notified gets its answer.
	Info     *pluginregistration.PluginInfo
	Notified chan *pluginregistration.RegistrationStatus

	mu      sync.Mutex
	list    []*v1beta1.Device
	changed chan struct{} // closed and replaced at each new list
	calls   map[string]int
	args    map[string][][]string // by the RPC's name
	server  *grpc.Server
	serving sync.WaitGroup
}

// NewPlugin returns a plugin that offers devices. It neither serves nor registers yet.
func NewPlugin(resource, socket string, list ...*v1beta1.Device) *Plugin {
	return &Plugin{
		Resource: resource, Socket: socket, Options: &v1beta1.DevicePluginOptions{}, list: list,
		changed: make(chan struct{}), calls: map[string]int{}, args: map[string][][]string{},
		Notified: make(chan *pluginregistration.RegistrationStatus, 16),
	}
}

// device is a healthy device that is close to NUMA nodes. Without nodes it has no topology.
func device(id string, nodes ...int64) *v1beta1.Device {
	d := &v1beta1.Device{ID: id, Health: v1beta1.Healthy}
	if len(nodes) > 0 {
		d.Topology = &v1beta1.TopologyInfo{}
		for _, node := range nodes {
			d.Topology.Nodes = append(d.Topology.Nodes, &v1beta1.NUMANode{ID: node})
		}
	}
	return d
}

// unhealthy is a device that is not healthy.
func unhealthy(id string) *v1beta1.Device { return &v1beta1.Device{ID: id, Health: v1beta1.Unhealthy} }

// numbered are healthy devices d000, d001 and so on.
func numbered(count int) (list []*v1beta1.Device) {
	for i := range count {
		list = append(list, device(fmt.Sprintf("d%03d", i)))
	}
	return list
}

// Serve makes the socket and serves until Stop.
func (p *Plugin) Serve() error {
	if err := os.Remove(p.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", p.Socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(server, p)
	if p.Info != nil {
		pluginregistration.RegisterRegistrationServer(server, p)
	}
	p.mu.Lock()
	p.server = server
	p.mu.Unlock()
	p.serving.Go(func() { _ = server.Serve(l) })
	return nil
}

// Stop ends all calls and removes the socket.
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

// Update sends a new list.
func (p *Plugin) Update(list ...*v1beta1.Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = list
	close(p.changed)
	p.changed = make(chan struct{})
}

// Register asks the kubelet's socket in the directory dir to use the plugin.
func (p *Plugin) Register(ctx context.Context, dir string) error {
	return register(ctx, dir, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: filepath.Base(p.Socket), ResourceName: p.Resource, Options: p.Options,
	})
}

func register(ctx context.Context, dir string, request *v1beta1.RegisterRequest) error {
	conn, err := dial(filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		return err
	}
	_, err = v1beta1.NewRegistrationClient(conn).Register(ctx, request)
	return errors.Join(err, conn.Close())
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
}

// Calls is how often an RPC was called.
func (p *Plugin) Calls(rpc string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls[rpc]
}

// Args are the device IDs of each call of an RPC, sorted.
func (p *Plugin) Args(rpc string) [][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.args[rpc])
}

func (p *Plugin) note(rpc string, ids []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls[rpc]++
	if ids != nil {
		p.args[rpc] = append(p.args[rpc], slices.Sorted(slices.Values(ids)))
	}
}

// GetDevicePluginOptions returns Options.
func (p *Plugin) GetDevicePluginOptions(ctx context.Context, _ *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	p.note("GetDevicePluginOptions", nil)
	if p.OnOptions != nil {
		if err := p.OnOptions(ctx); err != nil {
			return nil, err
		}
	}
	return p.Options, nil
}

// ListAndWatch sends the list, and again after each Update.
func (p *Plugin) ListAndWatch(_ *v1beta1.Empty, stream v1beta1.DevicePlugin_ListAndWatchServer) error {
	p.note("ListAndWatch", nil)
	for {
		if p.OnList != nil {
			if err := p.OnList(); err != nil {
				return err
			}
		}
		p.mu.Lock()
		list, changed := p.list, p.changed
		p.mu.Unlock()
		if err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: list}); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// Allocate gives a container an environment variable, and a device node and a CDI device for each device.
func (p *Plugin) Allocate(ctx context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	ids := r.ContainerRequests[0].DevicesIds
	p.note("Allocate", ids)
	if p.OnAllocate != nil {
		return p.OnAllocate(ctx, ids)
	}
	return allocated(p.plain(ids)), nil
}

func allocated(r *response) *v1beta1.AllocateResponse {
	return &v1beta1.AllocateResponse{ContainerResponses: []*response{r}}
}

func (p *Plugin) plain(ids []string) *response {
	sorted := slices.Sorted(slices.Values(ids))
	_, name, _ := strings.Cut(p.Resource, "/")
	r := &response{Envs: map[string]string{strings.ToUpper(name): strings.Join(sorted, ",")}}
	for _, id := range sorted {
		path := "/dev/" + name + "-" + id
		r.Devices = append(r.Devices, &v1beta1.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rw"})
		r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: p.Resource + "=" + id})
	}
	return r
}

// GetPreferredAllocation prefers what OnPrefer returns.
func (p *Plugin) GetPreferredAllocation(
	ctx context.Context, r *v1beta1.PreferredAllocationRequest,
) (*v1beta1.PreferredAllocationResponse, error) {
	request := r.ContainerRequests[0]
	p.note("GetPreferredAllocation", request.AvailableDeviceIDs)
	if p.OnPrefer == nil {
		return &v1beta1.PreferredAllocationResponse{}, nil
	}
	ids, err := p.OnPrefer(ctx, request)
	return &v1beta1.PreferredAllocationResponse{
		ContainerResponses: []*v1beta1.ContainerPreferredAllocationResponse{{DeviceIDs: ids}},
	}, err
}

// PreStartContainer does what OnPreStart says.
func (p *Plugin) PreStartContainer(
	ctx context.Context, r *v1beta1.PreStartContainerRequest,
) (*v1beta1.PreStartContainerResponse, error) {
	p.note("PreStartContainer", r.DevicesIds)
	if p.OnPreStart != nil {
		if err := p.OnPreStart(ctx, r.DevicesIds); err != nil {
			return nil, err
		}
	}
	return &v1beta1.PreStartContainerResponse{}, nil
}

// GetInfo is what the plugin watcher calls.
func (p *Plugin) GetInfo(context.Context, *pluginregistration.InfoRequest) (*pluginregistration.PluginInfo, error) {
	p.note("GetInfo", nil)
	return p.Info, nil
}

// NotifyRegistrationStatus sends to Notified.
func (p *Plugin) NotifyRegistrationStatus(
	_ context.Context, s *pluginregistration.RegistrationStatus,
) (*pluginregistration.RegistrationStatusResponse, error) {
	select {
	case p.Notified <- s:
	default: // no case reads them all
	}
	return &pluginregistration.RegistrationStatusResponse{}, nil
}
