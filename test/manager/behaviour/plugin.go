package behaviour

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/test/lib/plugintest"
)

type (
	does      = plugintest.Behaviour
	response  = v1beta1.ContainerAllocateResponse
	available = v1beta1.ContainerPreferredAllocationRequest
)

// Options of plugins.
var (
	withPreStart   = &v1beta1.DevicePluginOptions{PreStartRequired: true}
	withPreference = &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}
)

// Plugin is a device plugin with the path of its socket.
type Plugin struct {
	*plugintest.Plugin
	Socket string

	info     *pluginregistration.PluginInfo // of a plugin in the registry, see discover
	notified chan *pluginregistration.RegistrationStatus
}

// NewPlugin returns a plugin that offers devices. It neither serves nor registers yet.
func NewPlugin(resource, socket string, list ...*v1beta1.Device) *Plugin {
	p := &Plugin{Plugin: plugintest.New(resource, list...), Socket: socket}
	p.Behave(does{})
	return p
}

// Behave replaces the behaviour. The default of Allocate is plain.
func (p *Plugin) Behave(b does) {
	if b.Allocate == nil {
		b.Allocate = p.plain
	}
	p.Plugin.Behave(b)
}

// plain returns an environment variable, and a device node and a CDI device for each device.
func (p *Plugin) plain(_ context.Context, ids []string) (*response, error) {
	sorted := slices.Sorted(slices.Values(ids))
	_, name, _ := strings.Cut(p.Resource, "/")
	r := &response{Envs: map[string]string{strings.ToUpper(name): strings.Join(sorted, ",")}}
	for _, id := range sorted {
		path := "/dev/" + name + "-" + id
		r.Devices = append(r.Devices, &v1beta1.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rw"})
		r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: p.Resource + "=" + id})
	}
	return r, nil
}

// Serve creates the socket, replacing one that was left, and serves until Stop.
func (p *Plugin) Serve() error {
	if err := os.Remove(p.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return p.Plugin.Serve(p.Socket)
}

// Register registers the plugin at the kubelet's socket in dir, even if the plugin does not serve.
func (p *Plugin) Register(ctx context.Context, dir string) error {
	return register(ctx, dir, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: filepath.Base(p.Socket), ResourceName: p.Resource,
	})
}

func register(ctx context.Context, dir string, request *v1beta1.RegisterRequest) error {
	return plugintest.Register(ctx, filepath.Join(dir, "kubelet.sock"), request)
}

// device returns a healthy device that is close to NUMA nodes. Without nodes it has no topology.
func device(id string, nodes ...int64) *v1beta1.Device { return plugintest.Device(id, true, nodes...) }

// unhealthy returns an unhealthy device.
func unhealthy(id string, nodes ...int64) *v1beta1.Device {
	return plugintest.Device(id, false, nodes...)
}

// numbered returns healthy devices d000, d001 and so on.
func numbered(count int) (list []*v1beta1.Device) {
	for i := range count {
		list = append(list, device(fmt.Sprintf("d%03d", i)))
	}
	return list
}
