package behaviour

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

var watcher = []Case{
	{
		Name:    "a plugin in the registry is found, admitted to, and gone with its socket",
		Mirrors: "TestPluginRegistration; reconciler Register, Unregister; TestDevicePluginReRegistrationProbeMode",
		Run: func(n *Node) {
			p := n.discover("gpu.sock", gpu, numbered(2)...)
			n.serve(p)
			n.notified(p, true)
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
			n.admit(single("a", 2))
			n.equal("number of devices", 2, len(n.has(single("a", 2), "main")))
			p.Stop()
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 0})
			n.serve(p)
			n.notified(p, true)
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
		},
	},
	{
		Name:    "plugins that are there before the manager, and in directories of the registry, are found",
		Mirrors: "TestPluginRegistrationAtKubeletStart",
		Run: func(n *Node) {
			testenv.Must(n, n.Stop())
			testenv.Must(n, os.Mkdir(filepath.Join(n.config.Registry, "sub"), 0o750))
			first, second := n.discover("gpu.sock", gpu, numbered(2)...), n.discover("sub/nic.sock", nic, device("n0"))
			n.serve(first)
			n.serve(second)
			n.boot(Boot{})
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
			n.awaitCounts(nic, Counts{Capacity: 1, Allocatable: 1})
		},
	},
	{
		Name:    "a plugin in the registry may name another socket",
		Mirrors: "facts 1a: Plugin watcher, Endpoint",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(2)...)
			n.serve(p)
			herald := n.discover("gpu.sock", gpu)
			herald.info.Endpoint = p.Socket
			n.serve(herald)
			n.notified(herald, true)
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
		},
	},
	{
		Name:    "a plugin in the registry that cannot be used is told so",
		Mirrors: "TestPluginRegistration; ValidatePlugin",
		Run: func(n *Node) {
			version := n.discover("version.sock", gpu, numbered(1)...)
			version.info.SupportedVersions = []string{"v9"}
			name := n.discover("name.sock", "gpu", numbered(1)...)
			kind := n.discover("kind.sock", gpu, numbered(1)...)
			kind.info.Type = "Gadget"
			for _, p := range []*Plugin{version, name, kind} {
				n.serve(p)
			}
			n.notified(version, false)
			n.notified(name, false)
			// A plugin of another type is not for the device manager: the kubelet refuses it if nothing else handles
			// the type.
			n.equal("counts", Counts{}, n.Counts(gpu))
		},
	},
	{
		Name:    "hidden sockets and other files in the registry are not asked",
		Mirrors: "facts 1a: Plugin watcher",
		Run: func(n *Node) {
			hidden := n.discover(".gpu.sock", gpu, numbered(1)...)
			n.serve(hidden)
			n.write(filepath.Join(n.config.Registry, "notes"), "not a socket")
			seen := n.discover("nic.sock", nic, device("n0"))
			n.serve(seen)
			n.notified(seen, true)
			n.equal("calls", 0, hidden.Calls().Info)
		},
	},
	{
		Name:    "two plugins in the registry with one resource: the newest has it",
		Mirrors: "TestPluginRegistrationSameName, reconciler ReRegister",
		Run: func(n *Node) {
			first := n.discover("first.sock", gpu, numbered(2)...)
			n.serve(first)
			n.notified(first, true)
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
			second := n.discover("second.sock", gpu, numbered(3)...)
			n.serve(second)
			n.notified(second, true)
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 3})
		},
	},
}

// discover returns a plugin with a socket in the registry, which does not serve yet.
func (n *Node) discover(name, resource string, list ...*v1beta1.Device) *Plugin {
	p := NewPlugin(resource, filepath.Join(n.config.Registry, name), list...)
	p.info = &pluginregistration.PluginInfo{
		Type: pluginregistration.DevicePlugin, Name: resource, SupportedVersions: []string{v1beta1.Version},
	}
	p.notified = make(chan *pluginregistration.RegistrationStatus, 16)
	p.Behave(does{
		Info: func(context.Context) (*pluginregistration.PluginInfo, error) { return p.info, nil },
		Notify: func(_ context.Context, s *pluginregistration.RegistrationStatus) error {
			select {
			case p.notified <- s:
			default: // no case reads them all
			}
			return nil
		},
	})
	n.Cleanup(p.Stop)
	return p
}

// notified waits for the answer to a plugin in the registry.
func (n *Node) notified(p *Plugin, registered bool) {
	n.Helper()
	select {
	case s := <-p.notified:
		if s.PluginRegistered != registered || registered != (s.Error == "") {
			n.Errorf("%s was told %v", p.Socket, s)
		}
	case <-time.After(patience):
		n.Fatalf("%s was told nothing", p.Socket)
	}
}
