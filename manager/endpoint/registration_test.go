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
	"gpu-cdi-plugin/test/lib/testenv"
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

func TestEndpointsStayInTheDirectory(t *testing.T) {
	b := start(t, endpoint.Options{})
	outside := filepath.Join(filepath.Dir(b.dir), "outside")
	for _, dir := range []string{outside, filepath.Join(b.dir, "sub")} {
		testenv.Must(t, os.Mkdir(dir, 0o755))
	}
	p := plugintest.New(gpu)
	testenv.Must(t, p.Serve(filepath.Join(outside, "x.sock")))
	t.Cleanup(p.Stop)
	links := map[string]string{
		"link.sock": filepath.Join(outside, "x.sock"), "relative.sock": "../outside/x.sock", "dir": outside, "loop": "loop",
	}
	for name, target := range links {
		testenv.Must(t, os.Symlink(target, filepath.Join(b.dir, name)))
	}
	testenv.Must(t, os.WriteFile(filepath.Join(b.dir, "file"), nil, 0o600))
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

func TestAPluginThatRegistersBeforeItServes(t *testing.T) {
	b := start(t, endpoint.Options{})
	registered := make(chan error, 1)
	go func() { registered <- plugintest.Register(t.Context(), b.socket(), request(gpu, "late.sock")) }()
	b.serve("late.sock", plugintest.New(gpu, plugintest.Devices(2)...))
	testenv.Must(t, <-registered)
	b.waitFor(gpu, "2 of 2 healthy")
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
			"failed to get device plugin options: out of order",
		},
		"no answer": {
			plugintest.Hang,
			"failed to get device plugin options: the device plugin did not answer in time",
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
		b.waitFor(fmt.Sprintf("example.com/r%03d", i), "2 of 2 healthy")
	}
	if n := len(b.resources()); n != 100 {
		t.Errorf("%d resources", n)
	}
}
