package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// server is the device plugin service of one resource. It answers from its list; no call waits for the driver or for a
// file.
type server struct {
	v1beta1.UnimplementedDevicePluginServer

	options  AllocateOptions
	log      *slog.Logger
	observer Observer
	streams  streams

	updating sync.Mutex
	list     atomic.Pointer[list]
	draining chan struct{}
	drain    func()
}

var _ v1beta1.DevicePluginServer = (*server)(nil)

// list is one state of the resource's devices. It is immutable.
type list struct {
	resource resource.Resource
	devices  map[string]*device
	healthy  int
	prefer   preference
	message  *v1beta1.ListAndWatchResponse
	response *v1beta1.ContainerAllocateResponse // what every container gets besides its devices
	replaced chan struct{}                      // closed when the server has another list
}

// device is a device of a list.
type device struct {
	*resource.Device
	index    int                                // in the list
	response *v1beta1.ContainerAllocateResponse // what a container gets for the device
}

// newServer returns a server with a first list. The options are valid.
func newServer(r resource.Resource, o AllocateOptions, log *slog.Logger, observer Observer) (*server, error) {
	s := &server{
		options:  o,
		log:      log.With("resource", r.Name),
		observer: observer,
		draining: make(chan struct{}),
	}
	s.drain = sync.OnceFunc(func() { close(s.draining) })
	first, err := s.newList(r)
	if err != nil {
		return nil, err
	}
	s.list.Store(first)
	return s, nil
}

// update replaces the list. When it returns, a device that left the list cannot be allocated. The new list is sent at
// once. An equal list is not sent. On an error the old list stays.
func (s *server) update(r resource.Resource) error {
	s.updating.Lock()
	defer s.updating.Unlock()
	next, err := s.newList(r)
	if err != nil {
		return err
	}
	old := s.list.Load()
	if proto.Equal(old.message, next.message) {
		// Only what Allocate uses may differ: nothing is sent, and the streams keep waiting.
		next.replaced = old.replaced
		s.list.Store(next)
		return nil
	}
	s.list.Store(next)
	close(old.replaced)
	return nil
}

func (s *server) newList(r resource.Resource) (*list, error) {
	if err := resource.CheckName(r.Name); err != nil {
		return nil, err
	}
	l := &list{
		resource: r,
		devices:  make(map[string]*device, len(r.Devices)),
		message:  &v1beta1.ListAndWatchResponse{Devices: make([]*v1beta1.Device, len(r.Devices))},
		response: s.options.extrasResponse(r.Grant),
		replaced: make(chan struct{}),
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if err := l.checkID(d.ID); err != nil {
			return nil, fmt.Errorf("list %s: %w", r.Name, err)
		}
		l.devices[d.ID] = &device{d, i, s.options.response(d.Grant)}
		l.message.Devices[i] = apiDevice(d)
		if d.Healthy {
			l.healthy++
		}
	}
	if size := proto.Size(l.message); size > resource.MaxList {
		return nil, fmt.Errorf("advertise %s: %d devices make a message of %d bytes, and the kubelet takes at most "+
			"%d; lower the number of replicas", r.Name, len(r.Devices), size, resource.MaxList)
	}
	var err error
	l.prefer, err = s.options.Preference.of(&l.resource)
	return l, err
}

// checkID validates a device ID. The kubelet would count a duplicate twice.
func (l *list) checkID(id string) error {
	switch {
	case id == "":
		return errors.New("a device has no ID")
	case len(id) > resource.MaxID:
		return fmt.Errorf("device ID %q has %d characters, and %d are allowed", id, len(id), resource.MaxID)
	case l.devices[id] != nil:
		return fmt.Errorf("two devices have the ID %q", id)
	}
	return nil
}

// apiDevice converts a device to the API's type. A device without a NUMA node has no topology at all: the kubelet never
// allocates a device whose topology is empty.
func apiDevice(d *resource.Device) *v1beta1.Device {
	m := &v1beta1.Device{ID: d.ID, Health: v1beta1.Unhealthy}
	if d.Healthy {
		m.Health = v1beta1.Healthy
	}
	if d.NUMANode != gpu.NoNUMANode {
		m.Topology = &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: int64(d.NUMANode)}}}
	}
	return m
}

// GetDevicePluginOptions lists the optional calls that the kubelet may make.
func (s *server) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return options(), nil
}

func options() *v1beta1.DevicePluginOptions {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

// ListAndWatch sends the list, and each later one. A stream that is slower than the changes gets the newest list.
func (s *server) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	defer s.streams.enter()()
	for {
		l := s.list.Load()
		if err := stream.Send(l.message); err != nil {
			return err
		}
		select {
		case <-l.replaced:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.draining:
			return status.Error(codes.Unavailable, "the device plugin stops")
		}
	}
}

// PreStartContainer does nothing: GetDevicePluginOptions does not list it.
func (s *server) PreStartContainer(
	context.Context, *v1beta1.PreStartContainerRequest,
) (*v1beta1.PreStartContainerResponse, error) {
	return &v1beta1.PreStartContainerResponse{}, nil
}

// streams are the ListAndWatch calls under way. Each has a number, counted from 1.
type streams struct {
	changed func() // called after each change; may be nil

	mu      sync.Mutex
	started uint64
	open    map[uint64]struct{}
}

// enter records a new stream. The function that it returns records its end.
func (s *streams) enter() (leave func()) {
	s.mu.Lock()
	s.started++
	number := s.started
	if s.open == nil {
		s.open = map[uint64]struct{}{}
	}
	s.open[number] = struct{}{}
	s.mu.Unlock()
	s.notify()
	return func() {
		s.mu.Lock()
		delete(s.open, number)
		s.mu.Unlock()
		s.notify()
	}
}

func (s *streams) notify() {
	if s.changed != nil {
		s.changed()
	}
}

// last is the number of the stream that began last.
func (s *streams) last() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

// openAfter reports whether a stream is open that began after the one of that number.
func (s *streams) openAfter(number uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.open {
		if n > number {
			return true
		}
	}
	return false
}
