package endpoint_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// watch starts a registry with a plugin watcher.
func watch(t testing.TB) *bed { return start(t, endpoint.Options{RegistryDir: "watch"}) }

// discover starts a plugin with two devices at a socket in the directory of the plugin watcher.
func (b *bed) discover(socket, resource string, behaviour plugintest.Behaviour) *plugintest.Plugin {
	b.t.Helper()
	p := plugintest.New(resource, plugintest.Devices(2)...)
	p.Behave(behaviour)
	path := filepath.Join(b.registry, socket)
	testenv.Must(b.t, os.MkdirAll(filepath.Dir(path), 0o755))
	testenv.Must(b.t, p.Serve(path))
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
	testenv.Must(t, os.WriteFile(filepath.Join(b.registry, "file.sock"), nil, 0o600))
	for _, resource := range []string{"example.com/top", "example.com/new", "example.com/deep", last} {
		b.waitFor(resource, "2 of 2 healthy")
	}
	// A directory that is there already, and one that comes with its sockets.
	b.discover("new/y.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2 of 2 healthy")
	if n := len(b.resources()); n != 5 {
		t.Errorf("resources: %v", b.resources())
	}
}

func TestARemovedSocketDeregistersItsPlugin(t *testing.T) {
	b := watch(t)
	p := b.discover("a.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2 of 2 healthy")
	testenv.Must(t, os.Remove(filepath.Join(b.registry, "a.sock")))
	b.waitFor(gpu, "0 of 2 healthy") // though the plugin serves on
	b.waitCalls(p, func(c plugintest.Calls) bool { return c.Ended == 1 })
}

func TestARemovedDirectoryDeregistersItsPlugins(t *testing.T) {
	b := watch(t)
	b.discover("sub/dir/a.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2 of 2 healthy")
	testenv.Must(t, os.Rename(filepath.Join(b.registry, "sub"), filepath.Join(b.registry, ".sub")))
	b.waitFor(gpu, "0 of 2 healthy")
}

func TestASocketThatIsMadeAgainIsRegisteredAgain(t *testing.T) {
	b := watch(t)
	p := b.discover("a.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2 of 2 healthy")
	for range 20 {
		p.Stop()
		p = b.discover("a.sock", gpu, plugintest.Behaviour{})
		b.waitCalls(p, func(c plugintest.Calls) bool { return c.Notify == 1 })
		b.waitFor(gpu, "2 of 2 healthy")
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

func TestAnEndpointWhereOthersCanWriteIsRefused(t *testing.T) {
	b := watch(t)
	dir := directory(t)
	testenv.Must(t, os.Chmod(dir, 0o777))
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
	testenv.Must(t, os.Mkdir(dir, 0o777))
	testenv.Must(t, os.Chmod(dir, 0o777))
	b.discover("theirs/a.sock", "example.com/theirs", plugintest.Behaviour{})
	outside := filepath.Join(directory(t), "x.sock")
	p := plugintest.New("example.com/linked")
	testenv.Must(t, p.Serve(outside))
	t.Cleanup(p.Stop)
	for name, target := range map[string]string{"link.sock": outside, "link": filepath.Dir(outside)} {
		testenv.Must(t, os.Symlink(target, filepath.Join(b.registry, name)))
	}
	b.discover("z.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2 of 2 healthy")
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
			b.waitFor(gpu, "2 of 2 healthy")
			p.Stop()
			b.waitFor(gpu, "0 of 2 healthy")
		})
	}
}

func TestAPluginThatDoesNotAnswerTheWatcher(t *testing.T) {
	b := start(t, endpoint.Options{RegistryDir: "watch", Deadlines: endpoint.Deadlines{Info: 20 * time.Millisecond}})
	b.discover("a.sock", "example.com/stuck", plugintest.Behaviour{
		Info: func(ctx context.Context) (*registration.PluginInfo, error) { return nil, plugintest.Hang(ctx) },
	})
	b.discover("b.sock", gpu, plugintest.Behaviour{})
	b.waitFor(gpu, "2 of 2 healthy")
	b.waitLog("failed to get plugin info using RPC GetInfo", 1)
}
