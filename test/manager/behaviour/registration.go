package behaviour

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

var registration = []Case{
	{
		Name:    "it starts and stops again and again, and stopping it twice is no error",
		Mirrors: "TestNewManagerImplStart, TestNewManagerImplStartProbeMode",
		Run: func(n *Node) {
			for range 3 {
				n.plug(gpu, numbered(2)...)
				for range 2 {
					testenv.Must(n, n.Stop())
				}
				n.boot(Boot{})
			}
		},
	},
	{
		Name:    "at its start it removes stale sockets, and nothing else",
		Mirrors: "CleanupPluginDirectory",
		Run: func(n *Node) {
			testenv.Must(n, n.Stop())
			stale := filepath.Join(n.config.Dir, "stale.sock")
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
			testenv.Must(n, err)
			l.SetUnlinkOnClose(false)
			_ = l.Close()
			file, dir := filepath.Join(n.config.Dir, "notes"), filepath.Join(n.config.Dir, "more")
			n.write(file, "kept")
			testenv.Must(n, os.Mkdir(dir, 0o750))
			n.boot(Boot{})
			if _, err := os.Lstat(stale); !errors.Is(err, os.ErrNotExist) {
				n.Errorf("%s is there: %v", stale, err)
			}
			for _, path := range []string{file, dir, filepath.Join(n.config.Dir, "kubelet.sock")} {
				if _, err := os.Lstat(path); err != nil {
					n.Error(err)
				}
			}
		},
	},
	{
		Name:    "a plugin that cannot be used is refused with the reason",
		Mirrors: "Register; facts 1a",
		Run:     refuseRegistrations,
	},
	{
		Name:    "a plugin whose options cannot be got is refused, and its list is never asked for",
		Mirrors: "e2e device_plugin_failures_test.go: GetDevicePluginOptions",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(2)...)
			p.Behave(does{GetOptions: func(context.Context) error { return errors.New("no options today") }})
			n.serve(p)
			err := p.Register(n.Context(), n.config.Dir)
			if err == nil || !strings.Contains(err.Error(), "failed to get device plugin options") {
				n.Errorf("register: %v", err)
			}
			n.equal("calls of GetDevicePluginOptions and ListAndWatch", []int{1, 0},
				[]int{p.Calls().Options, p.Calls().Watch})
			n.equal("counts", Counts{}, n.Counts(gpu))
		},
	},
	{
		Name:    "a plugin whose socket is missing is refused after ten seconds",
		Mirrors: "facts 1a: Endpoint",
		Run: func(n *Node) {
			begin := time.Now()
			err := n.prepare(gpu).Register(n.Context(), n.config.Dir)
			if err == nil || !strings.Contains(err.Error(), "failed to dial device plugin:") {
				n.Errorf("register: %v", err)
			}
			// The limit is long enough for a busy machine, and much shorter than for ever.
			if took := time.Since(begin).Round(time.Second); took < 9*time.Second || took > 30*time.Second {
				n.Errorf("it took %v", took)
			}
		},
	},
	{
		Name:    "a plugin in the middle of an answer does not keep others from registering",
		Mirrors: "not covered upstream: slow plugin",
		Run: func(n *Node) {
			slow := n.prepare("example.com/slow", numbered(1)...)
			asked, done := make(chan struct{}), make(chan error, 1)
			slow.Behave(does{GetOptions: func(ctx context.Context) error {
				close(asked)
				return plugintest.Hang(ctx)
			}})
			n.serve(slow)
			ctx, cancel := context.WithCancel(n.Context())
			go func() { done <- slow.Register(ctx, n.config.Dir) }()
			<-asked
			n.plug(gpu, numbered(2)...)
			n.admit(single("a", 1))
			cancel()
			if err := <-done; err == nil {
				n.Error("a plugin without options was registered")
			}
		},
	},
	{
		Name:    "a plugin that registers again replaces its devices: 2, 3, then 1",
		Mirrors: "TestDevicePluginReRegistration, with all options",
		Run: func(n *Node) {
			for _, preStart := range []bool{false, true} {
				for _, prefer := range []bool{false, true} {
					var last *Plugin
					for _, list := range [][]*v1beta1.Device{
						{device("a"), device("b")}, {device("a"), device("b"), device("c")}, {device("d")},
					} {
						p := n.prepare(gpu, list...)
						p.Behave(does{Options: &v1beta1.DevicePluginOptions{
							PreStartRequired: preStart, GetPreferredAllocationAvailable: prefer,
						}})
						n.add(p)
						n.await("the new list arrives", func() bool { return p.Calls().Watch == 1 })
						n.awaitCounts(gpu, Counts{Capacity: len(list), Allocatable: len(list)})
						last = p
					}
					name := "single"
					n.admit(single(name, 1))
					n.start(single(name, 1), "main")
					n.equal("devices", []string{"d"}, n.has(single(name, 1), "main"))
					want := map[bool]int{true: 1}
					n.equal("calls of PreStartContainer", want[preStart], last.Calls().PreStart)
					n.release(single(name, 1))
				}
			}
		},
	},
	{
		Name:    "the options are those of GetDevicePluginOptions, not those of the registration",
		Mirrors: "facts 1a: RegisterRequest.Options",
		Run: func(n *Node) {
			p := n.prepare(gpu, numbered(2)...)
			n.serve(p)
			err := register(n.Context(), n.config.Dir, &v1beta1.RegisterRequest{
				Version: v1beta1.Version, Endpoint: filepath.Base(p.Socket), ResourceName: gpu,
				Options: &v1beta1.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true},
			})
			testenv.Must(n, err)
			n.awaitCounts(gpu, Counts{Capacity: 2, Allocatable: 2})
			n.admit(single("a", 1))
			n.start(single("a", 1), "main")
			n.equal("calls of PreStartContainer and GetPreferredAllocation", []int{0, 0},
				[]int{p.Calls().PreStart, p.Calls().Preferred})
		},
	},
	{
		Name:    "two resources have a plugin each",
		Mirrors: "TestUpdateCapacityAllocatable: second resource",
		Run: func(n *Node) {
			n.plug(gpu, numbered(3)...)
			other := n.plug("example.com/nic", device("n0"), unhealthy("n1"))
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 3})
			other.Stop()
			n.awaitCounts("example.com/nic", Counts{Capacity: 2, Allocatable: 0})
			n.awaitCounts(gpu, Counts{Capacity: 3, Allocatable: 3})
		},
	},
}

// refuseRegistrations sends requests that must be refused, and similar ones that must be accepted.
func refuseRegistrations(n *Node) {
	long := strings.Repeat("a", 63)
	const version = `requested API version "v1beta0" is not supported by kubelet. Supported version is ["v1beta1"]`
	for _, c := range []struct{ version, name, want string }{
		{"v1beta0", gpu, version},
		{"", gpu, strings.Replace(version, "v1beta0", "", 1)},
		{"v1beta1", "", `the ResourceName "" is invalid`},
		{"v1beta1", "gpu", `the ResourceName "gpu" is invalid`},
		{"v1beta1", "a/b/c", `the ResourceName "a/b/c" is invalid`},
		{"v1beta1", "mykubernetes.io/x", `the ResourceName "mykubernetes.io/x" is invalid`},
		{"v1beta1", "kubernetes.io/x", `the ResourceName "kubernetes.io/x" is invalid`},
		{"v1beta1", "requests.example.com/x", `the ResourceName "requests.example.com/x" is invalid`},
		{"v1beta1", "Example.com/x", `the ResourceName "Example.com/x" is invalid`},
		{"v1beta1", "example.com/", `the ResourceName "example.com/" is invalid`},
		{"v1beta1", "example.com/-x", `the ResourceName "example.com/-x" is invalid`},
		{"v1beta1", "example.com/" + long + "a", `is invalid`},
		{"v1beta1", strings.Repeat(long+".", 3) + strings.Repeat("a", 53) + "/x", `is invalid`}, // 245 + 9 bytes
		{"v1beta0", "", strings.Replace(version, "", "", 1)},                                    // the version comes first
		{"v1beta1", "example.com/" + long, ""},
		{"v1beta1", strings.Repeat(long+".", 3) + strings.Repeat("a", 52) + "/x", ""},
		{"v1beta1", "example.com/X_y.z-0", ""},
	} {
		p := n.prepare(c.name, numbered(1)...)
		n.serve(p)
		err := register(n.Context(), n.config.Dir, &v1beta1.RegisterRequest{
			Version: c.version, Endpoint: filepath.Base(p.Socket), ResourceName: c.name,
		})
		switch {
		case c.want == "" && err != nil:
			n.Errorf("register %q: %v", c.name, err)
		case c.want == "":
			n.awaitCounts(c.name, Counts{Capacity: 1, Allocatable: 1})
		case err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "code = Unknown"):
			n.Errorf("register %q with version %q: %v, want %q", c.name, c.version, err, c.want)
		}
		p.Stop()
	}
}
