package endpoint_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
)

// refused registers and returns the text of the error, which has the kubelet's code.
func (b *bed) refused(r *v1beta1.RegisterRequest) string {
	b.t.Helper()
	err := plugintest.Register(b.t.Context(), b.socket(), r)
	if err == nil || status.Code(err) != codes.Unknown {
		b.t.Fatalf("Register %v: %v", r, err)
	}
	return status.Convert(err).Message()
}

func TestVersions(t *testing.T) {
	b := start(t, endpoint.Options{})
	for _, version := range []string{"", "v1alpha1", "v1beta2", "V1BETA1"} {
		r := request(gpu, "a.sock")
		r.Version = version
		want := fmt.Sprintf(`requested API version %q is not supported by kubelet. Supported version is ["v1beta1"]`, version)
		if got := b.refused(r); got != want {
			t.Errorf("version %q: %s", version, got)
		}
	}
}

func TestResourceNames(t *testing.T) {
	long := strings.Repeat
	tests := map[string]struct {
		name string
		ok   bool
	}{
		"a domain and a name":                   {"example.com/gpu", true},
		"capitals, dots and lines in the name":  {"example.com/A-b_c.D", true},
		"a domain of one part":                  {"vendor/gpu", true},
		"a name of 63 bytes":                    {"example.com/" + long("a", 63), true},
		"a domain of 244 bytes":                 {long("a.", 121) + "aa/gpu", true},
		"nothing":                               {"", false},
		"no slash":                              {"gpu", false},
		"two slashes":                           {"example.com/gpu/big", false},
		"no domain":                             {"/gpu", false},
		"no name":                               {"example.com/", false},
		"a domain of Kubernetes":                {"kubernetes.io/gpu", false},
		"a subdomain of Kubernetes":             {"x.kubernetes.io/gpu", false},
		"a domain that ends as Kubernetes does": {"mykubernetes.io/x", false},
		"the prefix of quotas":                  {"requests.example.com/gpu", false},
		"capitals in the domain":                {"Example.com/gpu", false},
		"a domain that begins with a line":      {"-example.com/gpu", false},
		"a domain with an empty part":           {"example..com/gpu", false},
		"a name that ends with a dot":           {"example.com/gpu.", false},
		"a name of 64 bytes":                    {"example.com/" + long("a", 64), false},
		"a domain of 245 bytes":                 {long("a.", 122) + "a/gpu", false},
		"a new line":                            {"example.com/gpu\n", false},
	}
	b := start(t, endpoint.Options{})
	p := b.serve("a.sock", plugintest.New(gpu))
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			p.Resource = test.name
			err := p.Register(t.Context(), b.socket())
			want := fmt.Sprintf("the ResourceName %q is invalid", test.name)
			switch {
			case test.ok && err != nil:
				t.Error(err)
			case !test.ok && status.Convert(err).Message() != want:
				t.Errorf("Register: %v", err)
			}
		})
	}
}

func TestEndpointsStayInTheDirectory(t *testing.T) {
	b := start(t, endpoint.Options{})
	outside := filepath.Join(filepath.Dir(b.dir), "outside")
	for _, dir := range []string{outside, filepath.Join(b.dir, "sub")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	p := plugintest.New(gpu)
	if err := p.Serve(filepath.Join(outside, "x.sock")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	links := map[string]string{
		"link.sock": filepath.Join(outside, "x.sock"), "relative.sock": "../outside/x.sock", "dir": outside, "loop": "loop",
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(b.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(b.dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"", ".", "..", "../outside/x.sock", "sub/../../outside/x.sock", filepath.Join(outside, "x.sock"),
		"link.sock", "relative.sock", "dir/x.sock", "loop", "file", "sub", "a\x00b",
	} {
		want := fmt.Sprintf("the endpoint %q is not the name of a socket in %s", name, b.dir)
		if got := b.refused(request(gpu, name)); !strings.HasPrefix(got, want) {
			t.Errorf("endpoint %q: %s", name, got)
		}
	}
	if c := p.Calls(); c != (plugintest.Calls{}) {
		t.Errorf("the plugin outside was called: %+v", c)
	}
	inside := b.serve("sub/x.sock", plugintest.New(gpu))
	if err := plugintest.Register(t.Context(), b.socket(), request(gpu, "sub/x.sock")); err != nil {
		t.Errorf("a socket in a directory below: %v", err)
	}
	b.waitCalls(inside, func(c plugintest.Calls) bool { return c.Watch == 1 })
}

func TestAMissingSocketIsAwaited(t *testing.T) {
	t.Parallel()
	b := start(t, endpoint.Options{Deadlines: endpoint.Deadlines{Dial: 2 * time.Second}})
	b.failRegistration()
	if b.resources() != nil {
		t.Error("the resource is there")
	}
}

func TestAPluginThatRegistersBeforeItServes(t *testing.T) {
	b := start(t, endpoint.Options{})
	registered := make(chan error, 1)
	go func() { registered <- plugintest.Register(t.Context(), b.socket(), request(gpu, "late.sock")) }()
	b.serve("late.sock", plugintest.New(gpu, plugintest.Devices(2)...))
	if err := <-registered; err != nil {
		t.Fatal(err)
	}
	b.waitFor(gpu, "2/2")
}

func TestOptionsAreThoseOfThePlugin(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.serve("a.sock", plugintest.New(gpu, plugintest.Devices(1)...))
	p.Behave(plugintest.Behaviour{Options: &v1beta1.DevicePluginOptions{PreStartRequired: true}})
	r := request(gpu, "a.sock")
	r.Options = &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true} // is ignored
	if err := plugintest.Register(t.Context(), b.socket(), r); err != nil {
		t.Fatal(err)
	}
	o := b.endpoint(gpu).Options()
	if !o.GetPreStartRequired() || o.GetGetPreferredAllocationAvailable() {
		t.Errorf("options: %v", o)
	}
}

func TestAPluginWithoutOptionsIsNotRegistered(t *testing.T) {
	t.Parallel()
	b := start(t, endpoint.Options{Deadlines: endpoint.Deadlines{Options: 2 * time.Second}})
	p := b.serve("a.sock", plugintest.New(gpu, plugintest.Devices(1)...))
	tests := map[string]struct {
		answer func(context.Context) error
		want   string
	}{
		"an error": {
			func(context.Context) error { return errors.New("out of order") },
			"failed to get device plugin options: rpc error: code = Unknown desc = out of order",
		},
		"no answer": {
			plugintest.Hang,
			"failed to get device plugin options: rpc error: code = DeadlineExceeded desc = ",
		},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			before := p.Calls()
			p.Behave(plugintest.Behaviour{GetOptions: test.answer})
			if got := b.refused(request(gpu, "a.sock")); !strings.HasPrefix(got, test.want) {
				t.Errorf("Register: %s", got)
			}
			if c := p.Calls(); c.Options != before.Options+1 || c.Watch != 0 {
				t.Errorf("calls: %+v", c)
			}
			if _, err := b.Endpoint(gpu); !errors.Is(err, endpoint.ErrUnknownResource) || b.resources() != nil {
				t.Errorf("the resource is there: %v", err)
			}
		})
	}
}

func TestManyPluginsRegisterAtOnce(t *testing.T) {
	b := start(t, endpoint.Options{})
	var wg sync.WaitGroup
	for i := range 100 {
		p := b.serve(fmt.Sprintf("%d.sock", i), plugintest.New(fmt.Sprintf("example.com/r%03d", i), plugintest.Devices(2)...))
		wg.Go(func() {
			if err := p.Register(t.Context(), b.socket()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i := range 100 {
		b.waitFor(fmt.Sprintf("example.com/r%03d", i), "2/2")
	}
	if n := len(b.resources()); n != 100 {
		t.Errorf("%d resources", n)
	}
}
