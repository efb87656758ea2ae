package endpoint_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
)

// watch starts a registry with a plugin watcher.
func watch(t testing.TB) *bed { return start(t, endpoint.Options{RegistryDir: "watch"}) }

// discover starts a plugin with two devices at a socket in the directory of the plugin watcher.
func (b *bed) discover(socket, resource string, behaviour plugintest.Behaviour) *plugintest.Plugin {
	b.t.Helper()
	p := plugintest.New(resource, plugintest.Devices(2)...)
	p.Behave(behaviour)
	path := filepath.Join(b.registry, socket)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := p.Serve(path); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(p.Stop)
	return p
}

// statuses returns a behaviour that sends each status of the registration to a channel.
func statuses() (plugintest.Behaviour, <-chan *registration.RegistrationStatus) {
	got := make(chan *registration.RegistrationStatus, 100)
	return plugintest.Behaviour{Notify: func(_ context.Context, s *registration.RegistrationStatus) error {
		got <- s
		return nil
	}}, got
}

func TestAPluginIsDiscoveredAndToldSo(t *testing.T) {
	b := watch(t)
	behaviour, got := statuses()
	behaviour.Options = &v1beta1.DevicePluginOptions{PreStartRequired: true}
	p := b.discover("a.sock", gpu, behaviour)
	b.waitFor(gpu, "2/2")
	if d := cmp.Diff(&registration.RegistrationStatus{PluginRegistered: true}, <-got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	if !b.endpoint(gpu).Options().GetPreStartRequired() {
		t.Error("the options are not the plugin's")
	}
	b.allocate("gpu-0000")
	p.Stop()
	b.waitFor(gpu, "0/2")
	if c := p.Calls(); c.Info != 1 || c.Notify != 1 || c.Watch != 1 {
		t.Errorf("calls: %+v", c)
	}
}

func TestWherePluginsAreDiscovered(t *testing.T) {
	b := watch(t)
	last := "example.com/last"
	for socket, resource := range map[string]string{
		"b.sock":         "example.com/top",
		"new/x.sock":     "example.com/new",
		"new/a/b/c.sock": "example.com/deep",
		".hidden.sock":   "example.com/hidden",
		".dir/x.sock":    "example.com/in-hidden",
		"no-suffix":      last,
	} {
		b.discover(socket, resource, plugintest.Behaviour{})
	}
	if err := os.WriteFile(filepath.Join(b.registry, "file.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, resource := range []string{"example.com/top", "example.com/new", "example.com/deep", last} {
		b.waitFor(resource, "2/2")
	}
	// A directory that is there already, and one that comes with its sockets.
	b.discover("new/y.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2/2")
	if n := len(b.resources()); n != 5 {
		t.Errorf("resources: %v", b.resources())
	}
}

func TestSocketsFromBeforeTheStartAreDiscovered(t *testing.T) {
	b := watch(t)
	p := b.discover("sub/a.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2/2")
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	second := start(t, endpoint.Options{SocketDir: b.dir, RegistryDir: b.registry})
	second.waitFor(gpu, "2/2")
	if c := p.Calls(); c.Info != 2 {
		t.Errorf("calls: %+v", c)
	}
}

func TestARemovedSocketDeregistersItsPlugin(t *testing.T) {
	b := watch(t)
	p := b.discover("a.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2/2")
	if err := os.Remove(filepath.Join(b.registry, "a.sock")); err != nil {
		t.Fatal(err)
	}
	b.waitFor(gpu, "0/2") // though the plugin serves on
	b.waitCalls(p, func(c plugintest.Calls) bool { return c.Ended == 1 })
}

func TestARemovedDirectoryDeregistersItsPlugins(t *testing.T) {
	b := watch(t)
	b.discover("sub/dir/a.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2/2")
	if err := os.Rename(filepath.Join(b.registry, "sub"), filepath.Join(b.registry, ".sub")); err != nil {
		t.Fatal(err)
	}
	b.waitFor(gpu, "0/2")
}

func TestASocketThatIsMadeAgainIsRegisteredAgain(t *testing.T) {
	b := watch(t)
	p := b.discover("a.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2/2")
	for range 20 {
		p.Stop()
		p = b.discover("a.sock", gpu, plugintest.Behaviour{})
		b.waitCalls(p, func(c plugintest.Calls) bool { return c.Notify == 1 })
		b.waitFor(gpu, "2/2")
		b.allocate("gpu-0000")
	}
}

func TestWhatIsNoDevicePluginIsTold(t *testing.T) {
	info := func(change func(*registration.PluginInfo)) func(context.Context) (*registration.PluginInfo, error) {
		i := &registration.PluginInfo{
			Type: registration.DevicePlugin, Name: gpu, SupportedVersions: []string{v1beta1.Version},
		}
		change(i)
		return func(context.Context) (*registration.PluginInfo, error) { return i, nil }
	}
	tests := map[string]struct {
		change func(*registration.PluginInfo)
		want   string
	}{
		"another type": {
			func(i *registration.PluginInfo) { i.Type = registration.CSIPlugin },
			"RegisterPlugin error -- no handler registered for plugin type: CSIPlugin at socket SOCKET",
		},
		"other versions": {
			func(i *registration.PluginInfo) { i.SupportedVersions = []string{"v1", "v2"} },
			"RegisterPlugin error -- plugin validation failed with err: manager version, v1beta1, is not among plugin " +
				"supported versions [v1 v2]",
		},
		"a bad name": {
			func(i *registration.PluginInfo) { i.Name = "gpu" },
			"RegisterPlugin error -- plugin validation failed with err: invalid name of device plugin socket: " +
				`the ResourceName "gpu" is invalid`,
		},
		"a relative endpoint": {
			func(i *registration.PluginInfo) { i.Endpoint = "a.sock" },
			`RegisterPlugin error -- plugin validation failed with err: the endpoint "a.sock" is not an absolute path`,
		},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			b := watch(t)
			behaviour, got := statuses()
			behaviour.Info = info(test.change)
			p := b.discover("a.sock", gpu, behaviour)
			status := <-got
			want := strings.ReplaceAll(test.want, "SOCKET", filepath.Join(b.registry, "a.sock"))
			if status.GetPluginRegistered() || status.GetError() != want {
				t.Errorf("the status: %v", status)
			}
			if c := p.Calls(); c.Options != 0 {
				t.Errorf("calls: %+v", c)
			}
		})
	}
}

func TestAPluginMayServeAtAnotherSocket(t *testing.T) {
	b := watch(t)
	served := b.serve("served.sock", plugintest.New(gpu, plugintest.Devices(3)...))
	p := b.discover("a.sock", gpu, plugintest.Behaviour{Info: func(context.Context) (*registration.PluginInfo, error) {
		return &registration.PluginInfo{
			Type: registration.DevicePlugin, Name: gpu, Endpoint: filepath.Join(b.dir, "served.sock"),
			SupportedVersions: []string{v1beta1.Version},
		}, nil
	}})
	b.waitFor(gpu, "3/3")
	if p.Calls().Watch != 0 || served.Calls().Watch != 1 {
		t.Error("ListAndWatch was called at the socket of the registration")
	}
	p.Stop()
	b.waitFor(gpu, "0/3")
}

func TestAnEndpointWhereOthersCanWriteIsRefused(t *testing.T) {
	b := watch(t)
	dir := directory(t)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	behaviour, got := statuses()
	behaviour.Info = func(context.Context) (*registration.PluginInfo, error) {
		return &registration.PluginInfo{
			Type: registration.DevicePlugin, Name: gpu, Endpoint: filepath.Join(dir, "x.sock"),
			SupportedVersions: []string{v1beta1.Version},
		}, nil
	}
	b.discover("a.sock", gpu, behaviour)
	if s := <-got; s.GetPluginRegistered() || !strings.Contains(s.GetError(), "others can change it") {
		t.Errorf("the status: %v", s)
	}
}

func TestSocketsOfOthersAreNotDiscovered(t *testing.T) {
	b := watch(t)
	dir := filepath.Join(b.registry, "theirs")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	b.discover("theirs/a.sock", "example.com/theirs", plugintest.Behaviour{})
	outside := filepath.Join(directory(t), "x.sock")
	p := plugintest.New("example.com/linked")
	if err := p.Serve(outside); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	for name, target := range map[string]string{"link.sock": outside, "link": filepath.Dir(outside)} {
		if err := os.Symlink(target, filepath.Join(b.registry, name)); err != nil {
			t.Fatal(err)
		}
	}
	b.discover("z.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2/2")
	b.waitLog("device plugins in a directory are not registered", 1)
	if n := len(b.resources()); n != 1 {
		t.Errorf("resources: %v", b.resources())
	}
}

func TestAFailedRegistrationIsTriedAgain(t *testing.T) {
	fails := map[string]plugintest.Behaviour{
		"GetInfo": {
			Info: func(context.Context) (*registration.PluginInfo, error) { return nil, errors.New("not yet") },
		},
		"GetDevicePluginOptions": {GetOptions: func(context.Context) error { return errors.New("not yet") }},
		"NotifyRegistrationStatus": {Notify: func(context.Context, *registration.RegistrationStatus) error {
			return errors.New("not yet")
		}},
	}
	for what, behaviour := range fails {
		t.Run(what, func(t *testing.T) {
			b := watch(t)
			begin := time.Now()
			p := b.discover("a.sock", gpu, behaviour)
			b.waitLog("the registration of a plugin at a socket failed", 1)
			p.Behave(plugintest.Behaviour{})
			b.waitCalls(p, func(c plugintest.Calls) bool { return c.Info == 2 })
			if d := time.Since(begin); d < 400*time.Millisecond {
				t.Errorf("the second attempt came after %s", d)
			}
			b.waitFor(gpu, "2/2")
			p.Stop()
			b.waitFor(gpu, "0/2")
		})
	}
}

func TestAPluginThatDoesNotAnswerTheWatcher(t *testing.T) {
	b := start(t, endpoint.Options{RegistryDir: "watch", Deadlines: endpoint.Deadlines{Info: 20 * time.Millisecond}})
	b.discover("a.sock", "example.com/stuck", plugintest.Behaviour{
		Info: func(ctx context.Context) (*registration.PluginInfo, error) { return nil, plugintest.Hang(ctx) },
	})
	b.discover("b.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2/2")
	b.waitLog("failed to get plugin info using RPC GetInfo", 1)
}
