package conformance

import (
	"context"
	"errors"
	"flag"
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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/test/lib/plugintest"
)

type (
	allocated = v1beta1.ContainerAllocateResponse
	wanted    = v1beta1.ContainerPreferredAllocationRequest
)

// fake is a device plugin that keeps all rules, and registers whenever the kubelet starts. Tests replace parts of it to
// break one rule.
type fake struct {
	*plugintest.Plugin
	dir      string
	does     plugintest.Behaviour
	devices  []*v1beta1.Device
	request  *v1beta1.RegisterRequest
	info     *pluginregistration.PluginInfo
	response func(ids []string) *allocated // of Allocate, for correct requests

	registerFirst bool          // before it serves
	registers     int           // how often at most; 0: always
	patience      time.Duration // how long it waits for a kubelet; 0: for ever
	blind         []int         // the numbers of the kubelet's starts that it does not see
	keepSocket    bool          // when the kubelet removes it
	renews        time.Duration // how long it serves nothing at each start of the kubelet; 0: it serves on
	leaveSocket   bool          // at the end
	exit          int

	registered int
	starts     int           // of the kubelet
	ready      chan struct{} // closed when it serves
}

func newFake(dir string) *fake {
	f := &fake{
		Plugin: plugintest.New("example.com/gpu"), dir: dir, ready: make(chan struct{}),
		request: &v1beta1.RegisterRequest{
			Version: v1beta1.Version, Endpoint: "fake.sock", ResourceName: "example.com/gpu",
			Options: &v1beta1.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true},
		},
	}
	for i := range int64(4) {
		f.devices = append(f.devices, plugintest.Device(fmt.Sprintf("gpu-%d", i), true, i/2))
	}
	f.devices = append(f.devices, plugintest.Device("gpu-4", false))
	f.response = func(ids []string) *allocated {
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
	f.info = &pluginregistration.PluginInfo{
		Type: pluginregistration.DevicePlugin, Name: "example.com/gpu", SupportedVersions: []string{v1beta1.Version},
	}
	f.does = plugintest.Behaviour{
		Info:     func(context.Context) (*pluginregistration.PluginInfo, error) { return f.info, nil },
		Options:  f.request.GetOptions(),
		Allocate: f.allocate,
		Preferred: func(_ context.Context, r *wanted) ([]string, error) {
			return prefer(r)
		},
		PreStart: func(ctx context.Context, ids []string) error {
			_, err := f.allocate(ctx, ids)
			return err
		},
	}
	return f
}

// allocate gives healthy devices, each once.
func (f *fake) allocate(_ context.Context, ids []string) (*allocated, error) {
	for i, id := range ids {
		known := slices.ContainsFunc(f.devices, func(d *v1beta1.Device) bool {
			return d.GetID() == id && d.GetHealth() != v1beta1.Unhealthy
		})
		if !known || slices.Contains(ids[:i], id) {
			return nil, status.Errorf(codes.InvalidArgument, "no device %q can be given", id)
		}
	}
	return f.response(ids), nil
}

func prefer(r *wanted) ([]string, error) {
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

func (f *fake) socket() string  { return filepath.Join(f.dir, filepath.Base(f.request.GetEndpoint())) }
func (f *fake) kubelet() string { return filepath.Join(f.dir, socketName) }

func (f *fake) serve() error {
	_ = os.Remove(f.socket()) // it may not be there
	return f.Serve(f.socket())
}

// run serves until the context ends.
func (f *fake) run(ctx context.Context) error {
	f.SetDevices(f.devices...)
	f.Behave(f.does)
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer w.Close()
	if err := errors.Join(w.Add(f.dir), f.serve()); err != nil {
		return err
	}
	defer f.end()
	f.register(ctx)
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
				if f.renews > 0 {
					f.Stop()
					time.Sleep(f.renews)
				}
				if _, err := os.Stat(f.socket()); err != nil && !f.keepSocket {
					f.Stop()
					if err := f.serve(); err != nil {
						return err
					}
				}
				f.register(ctx)
			}
		case <-gone:
			if _, err := os.Stat(f.kubelet()); err != nil { // its event may have come too
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// runInRegistry serves until the context ends, also after its socket was removed.
func (f *fake) runInRegistry(ctx context.Context) error {
	f.SetDevices(f.devices...)
	f.Behave(f.does)
	defer f.end()
	for begun := false; ctx.Err() == nil; {
		if _, err := os.Stat(f.socket()); err != nil && (!begun || !f.keepSocket) {
			f.Stop()
			begun = f.serve() == nil // or else there is no registry now
		}
		select {
		case <-time.After(dialPause):
		case <-ctx.Done():
		}
	}
	return nil
}

func (f *fake) end() {
	f.Stop()
	if !f.leaveSocket {
		return
	}
	if l, err := net.ListenUnix("unix", &net.UnixAddr{Name: f.socket()}); err == nil {
		l.SetUnlinkOnClose(false)
		_ = l.Close()
	}
}

// register registers if there is a kubelet, whose socket may be there a moment before it listens.
func (f *fake) register(ctx context.Context) {
	if _, err := os.Stat(f.kubelet()); err != nil || f.registers > 0 && f.registered >= f.registers {
		return
	}
	if _, err := awaitServer(ctx, f.kubelet(), timeout); err != nil {
		return
	}
	if f.registerFirst {
		f.Stop()
		var serving sync.WaitGroup
		defer serving.Wait()
		serving.Go(func() {
			time.Sleep(timeout / 4) // the kubelet tries at once, and then again
			_ = f.serve()
		})
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if plugintest.Register(ctx, f.kubelet(), f.request) == nil {
		f.registered++
	}
}

// fakeVariable has the test binary be a fake plugin: its value is the name of a breach, or another text. The arguments
// are the directory, and "registry" if that is a registry.
const fakeVariable = "CONFORMANCE_FAKE"

func TestMain(m *testing.M) {
	name, isFake := os.LookupEnv(fakeVariable)
	if !isFake {
		// The tests wait most of the time, so more of them run at once than there are processors.
		flag.Parse()
		if err := flag.Set("test.parallel", "8"); err != nil {
			panic(err)
		}
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
	run := f.run
	if len(os.Args) > 2 {
		run = f.runInRegistry
	}
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(f.exit)
}
