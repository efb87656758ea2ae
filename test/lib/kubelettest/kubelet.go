// Package kubelettest has a kubelet in memory, for tests of device plugins. It takes registrations on a real socket and
// reads lists as the kubelet's device manager of Kubernetes 1.36 does, and can be told to misbehave.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Socket is the name of the kubelet's socket in its directory.
const Socket = "kubelet.sock"

// patience is how long the Wait functions wait before the test fails.
const patience = 20 * time.Second

// Kubelet is the kubelet's side of the device plugin API. Its methods may be called from anywhere.
type Kubelet struct {
	v1beta1.UnimplementedRegistrationServer

	// Dir is the directory of the sockets.
	Dir string

	t      testing.TB
	mu     sync.Mutex
	moved  chan struct{} // closed at each change
	server *grpc.Server
	served sync.WaitGroup
	refuse error
	mute   bool
	total  int
	asked  time.Time
	ends   map[string]*Endpoint
}

// Endpoint is a plugin that registered.
type Endpoint struct {
	Request *v1beta1.RegisterRequest
	Options *v1beta1.DevicePluginOptions
	// Client calls the plugin over the connection that its list is read on.
	Client v1beta1.DevicePluginClient

	conn   *grpc.ClientConn
	cancel context.CancelFunc
	done   chan struct{}

	// What follows is guarded by the kubelet's mutex.
	lists   int
	devices []*v1beta1.Device
	ended   error
}

// New returns a kubelet with a directory of its own that is not started yet. It is stopped when the test ends.
func New(t testing.TB) *Kubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // the path of a socket is short, and that of t.TempDir may be long
	if err != nil {
		t.Fatal(err)
	}
	k := &Kubelet{Dir: dir, t: t, moved: make(chan struct{}), ends: map[string]*Endpoint{}}
	t.Cleanup(func() {
		k.Stop()
		_ = os.RemoveAll(dir)
	})
	return k
}

// Start begins as a kubelet does: it removes every socket in its directory, then makes its own.
func (k *Kubelet) Start() {
	k.t.Helper()
	if err := k.removeSockets(); err != nil {
		k.t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(k.Dir, Socket))
	if err != nil {
		k.t.Fatal(err)
	}
	server := grpc.NewServer()
	v1beta1.RegisterRegistrationServer(server, k)
	k.mu.Lock()
	k.server = server
	k.mu.Unlock()
	k.served.Go(func() { _ = server.Serve(l) })
}

func (k *Kubelet) removeSockets() error {
	entries, err := os.ReadDir(k.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Type() != os.ModeSocket {
			continue
		}
		if err := os.Remove(filepath.Join(k.Dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Stop ends the kubelet and forgets all plugins. It removes its socket.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	server := k.server
	k.server = nil
	k.mu.Unlock()
	if server == nil {
		return
	}
	server.Stop()
	k.served.Wait()
	k.mu.Lock()
	ends := k.ends
	k.ends = map[string]*Endpoint{}
	k.mu.Unlock()
	for _, e := range ends {
		e.close()
	}
	k.tell()
}

// Restart is Stop and Start.
func (k *Kubelet) Restart() {
	k.t.Helper()
	k.Stop()
	k.Start()
}

// Refuse has registrations fail with err; nil takes them again.
func (k *Kubelet) Refuse(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse = err
}

// Mute has the kubelet take registrations and never ask for a list.
func (k *Kubelet) Mute(mute bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mute = mute
}

// Drop ends the stream of a resource and forgets the plugin, while the kubelet goes on.
func (k *Kubelet) Drop(resource string) {
	k.t.Helper()
	k.mu.Lock()
	e := k.ends[resource]
	delete(k.ends, resource)
	k.mu.Unlock()
	if e == nil {
		k.t.Fatalf("%s is not registered", resource)
	}
	e.close()
	k.tell()
}

// Register dials the plugin back before it answers, as the kubelet does.
func (k *Kubelet) Register(ctx context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	begin := time.Now()
	k.mu.Lock()
	k.total++
	k.asked = begin
	refuse := k.refuse
	k.mu.Unlock()
	defer k.tell()
	if refuse != nil {
		return nil, refuse
	}
	if r.GetVersion() != v1beta1.Version {
		return nil, fmt.Errorf("requested API version %q is not supported by kubelet", r.GetVersion())
	}
	e, err := connect(ctx, filepath.Join(k.Dir, r.GetEndpoint()))
	if err != nil {
		return nil, err
	}
	e.Request = r
	if !k.adopt(r.GetResourceName(), e) {
		e.close()
		return nil, errors.New("the kubelet stopped")
	}
	return &v1beta1.Empty{}, nil
}

// Connect reads the list of the plugin at a socket, as the kubelet does with one that it found in plugins_registry.
func (k *Kubelet) Connect(resource, socket string) error {
	e, err := connect(k.t.Context(), socket)
	if err != nil {
		return err
	}
	k.adopt(resource, e)
	return nil
}

func connect(ctx context.Context, socket string) (*Endpoint, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	e := &Endpoint{Client: v1beta1.NewDevicePluginClient(conn), conn: conn, cancel: func() {}, done: make(chan struct{})}
	if e.Options, err = e.Client.GetDevicePluginOptions(ctx, &v1beta1.Empty{}); err != nil {
		return nil, errors.Join(fmt.Errorf("ask for the plugin's options: %w", err), conn.Close())
	}
	return e, nil
}

// adopt makes e the resource's plugin; the newest wins.
func (k *Kubelet) adopt(resource string, e *Endpoint) bool {
	k.mu.Lock()
	if k.server == nil {
		k.mu.Unlock()
		close(e.done)
		return false
	}
	old := k.ends[resource]
	k.ends[resource] = e
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	if k.mute {
		close(e.done)
	} else {
		go k.read(ctx, e)
	}
	k.mu.Unlock()
	if old != nil {
		old.close()
	}
	k.tell()
	return true
}

// read reads lists until the stream ends. It is not tried again, which is the kubelet's way.
func (k *Kubelet) read(ctx context.Context, e *Endpoint) {
	defer close(e.done)
	stream, err := e.Client.ListAndWatch(ctx, &v1beta1.Empty{})
	for err == nil {
		var list *v1beta1.ListAndWatchResponse
		if list, err = stream.Recv(); err == nil {
			k.mu.Lock()
			e.lists++
			e.devices = list.GetDevices()
			k.mu.Unlock()
			k.tell()
		}
	}
	k.mu.Lock()
	e.ended = err
	k.mu.Unlock()
	k.tell()
}

func (e *Endpoint) close() {
	e.cancel()
	_ = e.conn.Close()
	<-e.done
}

// tell wakes those who wait.
func (k *Kubelet) tell() {
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.moved)
	k.moved = make(chan struct{})
}

// Total is how many registrations were asked for.
func (k *Kubelet) Total() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.total
}

// Asked is when the last registration was asked for.
func (k *Kubelet) Asked() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.asked
}

// Devices is the list of a resource, or nil if there is none now.
func (k *Kubelet) Devices(resource string) []*v1beta1.Device {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.devices(resource)
}

func (k *Kubelet) devices(resource string) []*v1beta1.Device {
	if e := k.ends[resource]; e != nil && e.ended == nil {
		return e.devices
	}
	return nil
}

// Lists is how many lists the plugin of a resource has sent since it registered.
func (k *Kubelet) Lists(resource string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if e := k.ends[resource]; e != nil {
		return e.lists
	}
	return 0
}

// WaitFor waits until the plugin of a resource has sent a list that fits, and returns the plugin.
func (k *Kubelet) WaitFor(resource string, fits func([]*v1beta1.Device) bool) *Endpoint {
	k.t.Helper()
	var found *Endpoint
	k.wait("a fitting list of "+resource, func() bool {
		e := k.ends[resource]
		if e == nil || e.ended != nil || e.lists == 0 || !fits(e.devices) {
			return false
		}
		found = e
		return true
	})
	return found
}

// WaitRegistered waits until the plugin of a resource has sent a list.
func (k *Kubelet) WaitRegistered(resource string) *Endpoint {
	k.t.Helper()
	return k.WaitFor(resource, func([]*v1beta1.Device) bool { return true })
}

// WaitTotal waits until so many registrations were asked for.
func (k *Kubelet) WaitTotal(n int) {
	k.t.Helper()
	k.wait(fmt.Sprintf("%d registrations", n), func() bool { return k.total >= n })
}

// WaitGone waits until the plugin of a resource has ended its stream.
func (k *Kubelet) WaitGone(resource string) {
	k.t.Helper()
	k.wait("the end of "+resource, func() bool {
		e := k.ends[resource]
		return e == nil || e.ended != nil
	})
}

// wait waits until done, which is called with the mutex held, is true.
func (k *Kubelet) wait(what string, done func() bool) {
	k.t.Helper()
	limit := time.After(patience)
	for {
		k.mu.Lock()
		ok, moved := done(), k.moved
		k.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-moved:
		case <-limit:
			k.t.Fatalf("no %s within %s", what, patience)
		}
	}
}
