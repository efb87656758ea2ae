package conformance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// fake is a device plugin that keeps all rules. Tests replace parts of it to break one. It watches the kubelet's
// socket as plugins do.
type fake struct {
	v1beta1.UnimplementedDevicePluginServer

	dir      string
	register *v1beta1.RegisterRequest
	options  *v1beta1.DevicePluginOptions

	getOptions func() error
	// list returns the devices for the stream with a number from 0, and why there is no list.
	list      func(stream int) ([]*v1beta1.Device, error)
	later     []*v1beta1.Device // a second list of the first stream
	allocate  func(call int, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error)
	container func(ids []string) *v1beta1.ContainerAllocateResponse
	preferred func(call int, r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error)
	preStart  func(ids []string) error

	registerFirst bool          // before it serves
	registers     int           // how often at most; 0: always
	patience      time.Duration // how long it waits for a kubelet; 0: for ever
	blind         []int         // the numbers of the kubelet's starts that it does not see
	keepSocket    bool          // when the kubelet removes it
	leaveSocket   bool          // at the end
	exit          int
	single        chan struct{} // has room for one stream

	mu        sync.Mutex
	calls     map[string]int
	devices   []*v1beta1.Device
	server    *grpc.Server
	serving   sync.WaitGroup
	announced int
	starts    int           // of the kubelet
	ready     chan struct{} // closed when it serves
}

func newFake(dir string) *fake {
	f := &fake{
		dir: dir,
		register: &v1beta1.RegisterRequest{
			Version:      v1beta1.Version,
			Endpoint:     "fake.sock",
			ResourceName: "example.com/gpu",
		},
		options: &v1beta1.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true},
		calls:   map[string]int{}, ready: make(chan struct{}),
	}
	for i := range 4 {
		f.devices = append(
			f.devices,
			&v1beta1.Device{ID: fmt.Sprintf("gpu-%d", i), Health: v1beta1.Healthy, Topology: &v1beta1.TopologyInfo{
				Nodes: []*v1beta1.NUMANode{{ID: int64(i / 2)}},
			}},
		)
	}
	f.devices = append(f.devices, &v1beta1.Device{ID: "gpu-4", Health: v1beta1.Unhealthy})
	f.register.Options = f.options
	f.container = func(ids []string) *v1beta1.ContainerAllocateResponse {
		r := &v1beta1.ContainerAllocateResponse{
			Envs:    map[string]string{"DEVICES": fmt.Sprint(ids)},
			Mounts:  []*v1beta1.Mount{{HostPath: "/usr/lib", ContainerPath: "/usr/lib", ReadOnly: true}},
			Devices: []*v1beta1.DeviceSpec{{HostPath: "/dev/null", ContainerPath: "/dev/null", Permissions: "rw"}},
		}
		for _, id := range ids {
			i := slices.IndexFunc(f.devices, func(d *v1beta1.Device) bool { return d.GetID() == id })
			r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: fmt.Sprintf("example.com/gpu=gpu%d", i)})
		}
		return r
	}
	f.preferred = func(_ int, r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
		return prefer(r)
	}
	f.list = func(int) ([]*v1beta1.Device, error) { return f.devices, nil }
	return f
}

func prefer(r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
	size := int(r.GetAllocationSize())
	chosen := slices.Clone(r.GetMustIncludeDeviceIDs())
	for _, id := range r.GetAvailableDeviceIDs() {
		if len(chosen) < size && !slices.Contains(chosen, id) {
			chosen = append(chosen, id)
		}
	}
	if len(chosen) != size {
		return nil, errors.New("impossible")
	}
	return chosen, nil
}

func (f *fake) count(call string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[call]++
	return f.calls[call] - 1
}

func (f *fake) called(call string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[call] > 0
}

func (f *fake) socket() string  { return filepath.Join(f.dir, filepath.Base(f.register.GetEndpoint())) }
func (f *fake) kubelet() string { return filepath.Join(f.dir, socketName) }

func (f *fake) serve() error {
	_ = os.Remove(f.socket())
	l, err := net.Listen("unix", f.socket())
	if err != nil {
		return err
	}
	if u, ok := l.(*net.UnixListener); ok && f.leaveSocket {
		u.SetUnlinkOnClose(false)
	}
	server := grpc.NewServer(grpc.MaxSendMsgSize(1 << 30))
	v1beta1.RegisterDevicePluginServer(server, f)
	f.server = server
	f.serving.Go(func() { _ = server.Serve(l) })
	return nil
}

func (f *fake) stop() {
	if f.server != nil {
		f.server.Stop()
		f.serving.Wait()
	}
}

// run serves until the context ends.
func (f *fake) run(ctx context.Context) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer w.Close()
	if err := errors.Join(w.Add(f.dir), f.serve()); err != nil {
		return err
	}
	defer f.stop()
	f.announce(ctx)
	close(f.ready)
	var gone <-chan time.Time
	for {
		select {
		case e := <-w.Events:
			switch {
			case e.Name == f.kubelet() && e.Has(fsnotify.Remove) && f.patience > 0:
				gone = time.After(f.patience)
			case e.Name == f.kubelet() && e.Has(fsnotify.Create):
				gone = nil
				if f.starts++; slices.Contains(f.blind, f.starts) {
					continue
				}
				if _, err := os.Stat(f.socket()); err != nil && !f.keepSocket {
					f.stop()
					if err := f.serve(); err != nil {
						return err
					}
				}
				f.announce(ctx)
			}
		case <-gone:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// announce registers. The socket may be there a moment before the kubelet listens, so calls wait for it.
func (f *fake) announce(ctx context.Context) {
	if _, err := os.Stat(f.kubelet()); err != nil {
		return
	}
	if f.registers > 0 && f.announced >= f.registers {
		return
	}
	if f.registerFirst {
		f.stop()
		f.serving.Go(func() {
			time.Sleep(50 * time.Millisecond) // the kubelet tries at once, and then again
			_ = f.serve()
		})
	}
	conn, err := grpc.NewClient("unix:"+f.kubelet(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: time.Millisecond, MaxDelay: 10 * time.Millisecond, Multiplier: 1},
			// Without it a connection has as long as the pause before it.
			MinConnectTimeout: timeout,
		}))
	if err != nil {
		return
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_, err = v1beta1.NewRegistrationClient(conn).Register(ctx, f.register, grpc.WaitForReady(true))
	if err == nil {
		f.announced++
	}
}

func (f *fake) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	if f.getOptions != nil {
		if err := f.getOptions(); err != nil {
			return nil, err
		}
	}
	return f.options, nil
}

func (f *fake) ListAndWatch(_ *v1beta1.Empty, s grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	n := f.count("watch")
	if f.single != nil {
		select {
		case f.single <- struct{}{}:
			defer func() { <-f.single }()
		case <-time.After(timeout / 2): // an earlier stream may be about to end
			return status.Error(codes.ResourceExhausted, "one stream only")
		}
	}
	devices, err := f.list(n)
	if err != nil {
		return err
	}
	send := func(devices []*v1beta1.Device) { _ = s.Send(&v1beta1.ListAndWatchResponse{Devices: devices}) }
	if devices != nil {
		send(devices)
	}
	if f.later != nil && n == 0 {
		send(f.later)
	}
	<-s.Context().Done()
	return nil
}

func (f *fake) Allocate(_ context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	n := f.count("allocate")
	if f.allocate != nil {
		return f.allocate(n, r)
	}
	return f.answer(r)
}

func (f *fake) answer(r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	response := &v1beta1.AllocateResponse{}
	for _, c := range r.GetContainerRequests() {
		for i, id := range c.GetDevicesIds() {
			known := slices.ContainsFunc(f.devices, func(d *v1beta1.Device) bool {
				return d.GetID() == id && d.GetHealth() != v1beta1.Unhealthy
			})
			if !known || slices.Contains(c.GetDevicesIds()[:i], id) {
				return nil, status.Errorf(codes.InvalidArgument, "no device %q can be given", id)
			}
		}
		response.ContainerResponses = append(response.ContainerResponses, f.container(c.GetDevicesIds()))
	}
	return response, nil
}

func (f *fake) GetPreferredAllocation(
	_ context.Context, r *v1beta1.PreferredAllocationRequest,
) (*v1beta1.PreferredAllocationResponse, error) {
	n := f.count("preferred")
	response := &v1beta1.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids, err := f.preferred(n, c)
		if err != nil {
			return nil, err
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

func (f *fake) PreStartContainer(
	_ context.Context, r *v1beta1.PreStartContainerRequest,
) (*v1beta1.PreStartContainerResponse, error) {
	if f.preStart != nil {
		return &v1beta1.PreStartContainerResponse{}, f.preStart(r.GetDevicesIds())
	}
	_, err := f.answer(&v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: r.GetDevicesIds()}},
	})
	return &v1beta1.PreStartContainerResponse{}, err
}

// fakeVariable has the test binary be a fake plugin: its value is the name of a breach, or "keeps all rules".
const fakeVariable = "CONFORMANCE_FAKE"

func TestMain(m *testing.M) {
	name, isFake := os.LookupEnv(fakeVariable)
	if !isFake {
		os.Exit(m.Run())
	}
	dir := fixedDir
	if len(os.Args) > 1 {
		dir = os.Args[1]
	}
	f := newFake(dir)
	if b, ok := breaches[name]; ok {
		b.breach(f)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := f.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(f.exit)
}
