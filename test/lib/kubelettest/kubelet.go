// Package kubelettest has a kubelet in memory, for tests of device plugins. It accepts registrations on a real socket
// and watches devices like the device manager of Kubernetes 1.31 to 1.36, or like that of 1.37. Tests can make it
// misbehave.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/test/lib/testenv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Socket is the name of the kubelet's socket in its directory.
const Socket = "kubelet.sock"

// timeout is how long the Wait functions wait before the test fails, on a busy machine too.
const timeout = time.Minute

// Kubelet is the kubelet's side of the device plugin API. Its methods may be called concurrently.
type Kubelet struct {
	v1beta1.UnimplementedRegistrationServer

	// Dir is the directory of the sockets.
	Dir string
	// Pods is the PodResources service, which serves on PodsSocket from Start to Stop.
	Pods       *PodResources
	PodsSocket string
	// Loses says that the end of one plugin of a resource disconnects the plugin that has registered last, as in
	// kubelets before 1.37. Otherwise a plugin that is left takes its place.
	Loses bool

	t         testing.TB
	record    []kubelet.Entry // see Record
	records   bool            // whether Record was called
	stopPods  func()          // nil while the PodResources service does not run
	mu        sync.Mutex
	changed   chan struct{} // closed and replaced at each change
	server    *grpc.Server
	serving   sync.WaitGroup
	refuse    error
	unwatched bool
	total     int
	asked     time.Time
	endpoints map[string]*Endpoint // by resource: the plugin that has registered last
	connected []*Endpoint          // since the start, in the order of their registrations
}

// Endpoint is a registered plugin of one resource.
type Endpoint struct {
	Request *v1beta1.RegisterRequest
	Options *v1beta1.DevicePluginOptions
	// Client calls the plugin, on the connection of the ListAndWatch stream.
	Client v1beta1.DevicePluginClient

	resource string
	conn     *grpc.ClientConn
	cancel   context.CancelFunc
	done     chan struct{}

	// The kubelet's mutex guards these.
	lists   int
	devices []*v1beta1.Device
	ended   error
}

// New returns a kubelet with its own directory. Start starts it. It is stopped when the test ends.
func New(t testing.TB) *Kubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // t.TempDir may be too long for the path of a socket
	testenv.Must(t, err)
	k := &Kubelet{
		Dir: filepath.Join(dir, "device-plugins"), Pods: &PodResources{},
		PodsSocket: filepath.Join(dir, "pod-resources", "kubelet.sock"),
		t:          t, changed: make(chan struct{}), endpoints: map[string]*Endpoint{},
	}
	testenv.Must(t, os.Mkdir(k.Dir, 0o755), os.Mkdir(filepath.Dir(k.PodsSocket), 0o755))
	t.Cleanup(func() {
		k.Stop()
		_ = os.RemoveAll(dir)
	})
	return k
}

// Start starts the kubelet like the real one: it removes all sockets in its directory, then creates its own.
func (k *Kubelet) Start() {
	k.t.Helper()
	testenv.Must(k.t, k.removeSockets())
	l, err := net.Listen("unix", filepath.Join(k.Dir, Socket))
	testenv.Must(k.t, err)
	server := grpc.NewServer()
	v1beta1.RegisterRegistrationServer(server, k)
	k.mu.Lock()
	k.server = server
	k.mu.Unlock()
	k.serving.Go(func() { _ = server.Serve(l) })
	k.StartPods()
}

// StartPods starts only the PodResources service.
func (k *Kubelet) StartPods() {
	k.t.Helper()
	stop, err := k.Pods.Serve(k.PodsSocket)
	testenv.Must(k.t, err)
	k.stopPods = stop
}

// StopPods stops only the PodResources service, and removes its socket.
func (k *Kubelet) StopPods() {
	if k.stopPods != nil {
		k.stopPods()
		k.stopPods = nil
	}
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

// Stop stops the kubelet, closes the connections to all plugins and removes the kubelet's socket.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	server := k.server
	k.server = nil
	k.mu.Unlock()
	if server == nil {
		return
	}
	k.StopPods()
	server.Stop()
	k.serving.Wait()
	k.mu.Lock()
	connected := k.connected
	k.endpoints, k.connected = map[string]*Endpoint{}, nil
	k.mu.Unlock()
	for _, e := range connected {
		e.close()
	}
	k.notify()
}

// Restart is Stop and Start.
func (k *Kubelet) Restart() {
	k.t.Helper()
	k.Stop()
	k.Start()
}

// Refuse makes registrations fail with err; nil makes them succeed again.
func (k *Kubelet) Refuse(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse = err
}

// Unwatch makes the kubelet accept registrations without a ListAndWatch call; false makes it watch again.
func (k *Kubelet) Unwatch(unwatched bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.unwatched = unwatched
}

// Record makes the kubelet keep a checkpoint with the devices of containers. It writes it now and, like the real one,
// at each list of devices.
func (k *Kubelet) Record(entries ...kubelet.Entry) {
	k.t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.record, k.records = entries, true
	k.write()
}

// write writes the checkpoint, if there is one. The caller has locked k.mu.
func (k *Kubelet) write() {
	if !k.records {
		return
	}
	c := kubelet.Checkpoint{PodDeviceEntries: k.record, RegisteredDevices: map[string][]string{}}
	for resource, e := range k.endpoints {
		c.RegisteredDevices[resource] = []string{}
		for _, d := range e.devices {
			if d.GetHealth() == v1beta1.Healthy {
				c.RegisteredDevices[resource] = append(c.RegisteredDevices[resource], d.GetID())
			}
		}
	}
	data, err := c.Marshal()
	if err == nil {
		err = fileio.Replace(filepath.Join(k.Dir, kubelet.CheckpointName), data, 0o600)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // the directory is gone at the end of the test
		k.t.Error(err)
	}
}

// Drop closes the connection to the plugin of a resource. The kubelet continues to run.
func (k *Kubelet) Drop(resource string) {
	k.t.Helper()
	k.mu.Lock()
	e := k.endpoints[resource]
	delete(k.endpoints, resource)
	k.mu.Unlock()
	if e == nil {
		k.t.Fatalf("%s is not registered", resource)
	}
	e.close()
	k.notify()
}

// Register implements the API. It connects to the plugin before it returns, like the kubelet.
func (k *Kubelet) Register(ctx context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	begin := time.Now()
	k.mu.Lock()
	k.total++
	k.asked = begin
	refuse := k.refuse
	k.mu.Unlock()
	defer k.notify()
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

// Connect watches the devices of the plugin at a socket, like a kubelet that has found the plugin in plugins_registry.
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
	client := v1beta1.NewDevicePluginClient(conn)
	e := &Endpoint{Client: client, conn: conn, cancel: func() {}, done: make(chan struct{})}
	if e.Options, err = e.Client.GetDevicePluginOptions(ctx, &v1beta1.Empty{}); err != nil {
		return nil, errors.Join(fmt.Errorf("get the plugin's options: %w", err), conn.Close())
	}
	return e, nil
}

// adopt makes e the resource's endpoint. An earlier one stays connected. It reports whether the kubelet runs.
func (k *Kubelet) adopt(resource string, e *Endpoint) bool {
	defer k.notify()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server == nil {
		close(e.done)
		return false
	}
	e.resource = resource
	k.endpoints[resource] = e
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	k.connected = append(k.connected, e)
	if k.unwatched {
		close(e.done)
	} else {
		go k.watch(ctx, e)
	}
	return true
}

// watch receives lists of devices until the stream ends. Like the kubelet, it does not open the stream again.
func (k *Kubelet) watch(ctx context.Context, e *Endpoint) {
	stream, err := e.Client.ListAndWatch(ctx, &v1beta1.Empty{})
	for err == nil {
		var list *v1beta1.ListAndWatchResponse
		if list, err = stream.Recv(); err == nil {
			k.mu.Lock()
			e.lists++
			e.devices = list.GetDevices()
			k.write()
			k.mu.Unlock()
			k.notify()
		}
	}
	lost := k.end(e, err)
	close(e.done)
	if lost != nil {
		lost.close()
	}
	k.notify()
}

// end records the end of a stream. It returns a plugin that the kubelet loses with it, or nil.
func (k *Kubelet) end(e *Endpoint, err error) (lost *Endpoint) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e.ended = err
	last := k.endpoints[e.resource]
	switch {
	case last == nil || last.ended != nil && last != e: // nothing is left to lose
	case k.Loses && last != e:
		return last
	case !k.Loses:
		for _, other := range k.connected {
			if other.resource == e.resource && other.ended == nil {
				k.endpoints[e.resource] = other
			}
		}
	}
	return nil
}

func (e *Endpoint) close() {
	e.cancel()
	_ = e.conn.Close()
	<-e.done
}

// notify wakes the Wait functions.
func (k *Kubelet) notify() {
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.changed)
	k.changed = make(chan struct{})
}

// Registrations returns the number of Register calls.
func (k *Kubelet) Registrations() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.total
}

// LastRegistration returns the time of the last Register call.
func (k *Kubelet) LastRegistration() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.asked
}

// Resources returns the resources whose plugins have registered, sorted.
func (k *Kubelet) Resources() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.endpoints))
}

// Devices returns the devices of a resource, or nil if its plugin is not connected.
func (k *Kubelet) Devices(resource string) []*v1beta1.Device {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.devices(resource)
}

func (k *Kubelet) devices(resource string) []*v1beta1.Device {
	if e := k.endpoints[resource]; e != nil && e.ended == nil {
		return e.devices
	}
	return nil
}

// Lists returns how many lists the plugin of a resource has sent since it registered.
func (k *Kubelet) Lists(resource string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if e := k.endpoints[resource]; e != nil {
		return e.lists
	}
	return 0
}

// WaitFor waits until the plugin of a resource has sent a list that fits, and returns its endpoint.
func (k *Kubelet) WaitFor(resource string, fits func([]*v1beta1.Device) bool) *Endpoint {
	k.t.Helper()
	var found *Endpoint
	k.wait("list that fits of "+resource, func() bool {
		e := k.endpoints[resource]
		if e == nil || e.ended != nil || e.lists == 0 || !fits(e.devices) {
			return false
		}
		found = e
		return true
	})
	return found
}

// WaitRegistered waits until the plugin of a resource has sent a list, and returns its endpoint.
func (k *Kubelet) WaitRegistered(resource string) *Endpoint {
	k.t.Helper()
	return k.WaitFor(resource, func([]*v1beta1.Device) bool { return true })
}

// WaitListed waits until the plugin of a resource has sent a list of so many healthy and unhealthy devices.
func (k *Kubelet) WaitListed(resource string, healthy, unhealthy int) *Endpoint {
	k.t.Helper()
	return k.WaitFor(resource, func(list []*v1beta1.Device) bool {
		good := 0
		for _, d := range list {
			if d.GetHealth() == v1beta1.Healthy {
				good++
			}
		}
		return good == healthy && len(list) == healthy+unhealthy
	})
}

// WaitRegistrations waits for the n-th Register call.
func (k *Kubelet) WaitRegistrations(n int) {
	k.t.Helper()
	k.wait(fmt.Sprintf("%d Register calls", n), func() bool { return k.total >= n })
}

// WaitGone waits until the ListAndWatch stream of a resource has ended.
func (k *Kubelet) WaitGone(resource string) {
	k.t.Helper()
	k.wait("end of the stream of "+resource, func() bool {
		e := k.endpoints[resource]
		return e == nil || e.ended != nil
	})
}

// wait waits until done returns true. done is called with the mutex held.
func (k *Kubelet) wait(what string, done func() bool) {
	k.t.Helper()
	limit := time.After(timeout)
	for {
		k.mu.Lock()
		ok, changed := done(), k.changed
		k.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-limit:
			k.t.Fatalf("no %s within %s", what, timeout)
		}
	}
}
