package endpoint_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
)

func TestArgumentsAndAnswersPassUnchanged(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 4)
	response := &v1beta1.ContainerAllocateResponse{
		Envs:        map[string]string{"A": "b"},
		Annotations: map[string]string{"c": "d"},
		Devices:     []*v1beta1.DeviceSpec{{ContainerPath: "/dev/x", HostPath: "/dev/y", Permissions: "weird"}},
		Mounts:      []*v1beta1.Mount{{ContainerPath: "/c", HostPath: "/h", ReadOnly: true}},
		CdiDevices:  []*v1beta1.CDIDevice{{Name: "not a CDI name"}},
	}
	asked := make(chan any, 3)
	p.Behave(plugintest.Behaviour{
		Allocate: func(_ context.Context, ids []string) (*v1beta1.ContainerAllocateResponse, error) {
			asked <- ids
			return response, nil
		},
		Preferred: func(_ context.Context, r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
			asked <- r
			return []string{"x", "x", ""}, nil
		},
		PreStart: func(_ context.Context, ids []string) error {
			asked <- ids
			return nil
		},
	})
	e := b.endpoint(gpu)
	got, err := e.Allocate(t.Context(), []string{"b", "a"})
	if d := cmp.Diff(response, got, protocmp.Transform()); d != "" || err != nil {
		t.Error(d, err)
	}
	if d := cmp.Diff([]string{"b", "a"}, <-asked); d != "" {
		t.Error(d)
	}
	ids, err := e.Preferred(t.Context(), []string{"c", "a"}, []string{"a"}, 2)
	if d := cmp.Diff([]string{"x", "x", ""}, ids); d != "" || err != nil {
		t.Error(d, err)
	}
	want := &v1beta1.ContainerPreferredAllocationRequest{
		AvailableDeviceIDs: []string{"c", "a"}, MustIncludeDeviceIDs: []string{"a"}, AllocationSize: 2,
	}
	if d := cmp.Diff(want, (<-asked).(*v1beta1.ContainerPreferredAllocationRequest), protocmp.Transform()); d != "" {
		t.Error(d)
	}
	if err := e.PreStart(t.Context(), []string{"z"}); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff([]string{"z"}, <-asked); d != "" {
		t.Error(d)
	}
}

func TestAResponseWithoutContainers(t *testing.T) {
	b := start(t, endpoint.Options{})
	b.connect("a.sock", 1).Behave(plugintest.Behaviour{
		Allocate: func(context.Context, []string) (*v1beta1.ContainerAllocateResponse, error) {
			return nil, nil //nolint:nilnil // leaves the container out of the response
		},
	})
	response, err := b.endpoint(gpu).Allocate(t.Context(), []string{"gpu-0000"})
	if response != nil || err != nil {
		t.Errorf("Allocate: %v, %v", response, err)
	}
}

// calls are the calls that a plugin answers or not.
var calls = map[string]func(context.Context, *endpoint.Endpoint) error{
	"Allocate": func(ctx context.Context, e *endpoint.Endpoint) error {
		_, err := e.Allocate(ctx, []string{"gpu-0000"})
		return err
	},
	"Preferred": func(ctx context.Context, e *endpoint.Endpoint) error {
		_, err := e.Preferred(ctx, []string{"gpu-0000"}, nil, 1)
		return err
	},
	"PreStart": func(ctx context.Context, e *endpoint.Endpoint) error { return e.PreStart(ctx, []string{"gpu-0000"}) },
}

// answer makes a plugin answer all calls with the error of a function.
func answer(f func(context.Context) error) plugintest.Behaviour {
	return plugintest.Behaviour{
		GetOptions: f,
		Allocate: func(ctx context.Context, _ []string) (*v1beta1.ContainerAllocateResponse, error) {
			return nil, f(ctx)
		},
		Preferred: func(ctx context.Context, _ *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
			return nil, f(ctx)
		},
		PreStart: func(ctx context.Context, _ []string) error { return f(ctx) },
	}
}

func TestErrorsOfPluginsPassUnchanged(t *testing.T) {
	b := start(t, endpoint.Options{})
	b.connect("a.sock", 1).Behave(answer(func(context.Context) error {
		return status.Error(codes.FailedPrecondition, "no such device")
	}))
	for name, call := range calls {
		err := call(t.Context(), b.endpoint(gpu))
		if status.Code(err) != codes.FailedPrecondition || status.Convert(err).Message() != "no such device" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// B9.
func TestCallsEndAtTheirDeadlines(t *testing.T) {
	limit := 50 * time.Millisecond
	b := start(t, endpoint.Options{Deadlines: endpoint.Deadlines{Allocate: limit, Preferred: limit, PreStart: limit}})
	b.connect("a.sock", 1).Behave(answer(plugintest.Hang))
	for name, call := range calls {
		if err := call(t.Context(), b.endpoint(gpu)); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The plugin sees each deadline as what is left of it.
func TestDefaultDeadlines(t *testing.T) {
	left := make(chan time.Duration, 1)
	b := start(t, endpoint.Options{})
	p := plugintest.New(gpu, plugintest.Devices(1)...)
	p.Behave(answer(func(ctx context.Context) error {
		deadline, _ := ctx.Deadline()
		left <- time.Until(deadline)
		return nil
	}))
	b.serve("a.sock", p)
	b.register(p)
	check := func(name string, want time.Duration) {
		t.Helper()
		if got := <-left; got > want || got < want-5*time.Second {
			t.Errorf("%s: %s are left, want %s", name, got, want)
		}
	}
	check("GetDevicePluginOptions", 10*time.Second)
	for name, want := range map[string]time.Duration{
		"Allocate": 10 * time.Second, "Preferred": 10 * time.Second, "PreStart": 30 * time.Second,
	} {
		if err := calls[name](t.Context(), b.endpoint(gpu)); err != nil {
			t.Fatal(name, err)
		}
		check(name, want)
	}
}

func TestCallsEndWithThePlugin(t *testing.T) {
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			b := start(t, endpoint.Options{})
			p := b.connect("a.sock", 1)
			p.Behave(answer(plugintest.Hang))
			e := b.endpoint(gpu)
			ended := make(chan error, 1)
			go func() { ended <- call(t.Context(), e) }()
			b.waitCalls(p, func(c plugintest.Calls) bool { return c.Allocate+c.Preferred+c.PreStart == 1 })
			p.EndStreams(errors.New("broken"))
			b.waitFor(gpu, "0 of 1 healthy")
			if err := <-ended; err == nil {
				t.Error("no error")
			}
			if err := call(t.Context(), e); !errors.Is(err, endpoint.ErrStopped) {
				t.Errorf("a call later: %v", err)
			}
		})
	}
}

func TestAStuckPluginCostsItsOwnResourceOnly(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 1)
	p.Behave(answer(plugintest.Hang))
	for _, call := range calls {
		go func() { _ = call(t.Context(), b.endpoint(gpu)) }()
	}
	b.waitCalls(p, func(c plugintest.Calls) bool { return c.Allocate+c.Preferred+c.PreStart == 3 })
	other := b.serve("b.sock", plugintest.New("example.com/other", plugintest.Devices(1)...))
	b.register(other)
	b.waitFor("example.com/other", "1 of 1 healthy")
	for name, call := range calls {
		if err := call(t.Context(), b.endpoint("example.com/other")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
