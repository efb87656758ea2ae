package plugin

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// server is the device plugin service of one resource. It answers from its list, so no call waits for the driver or
// for a file.
type server struct {
	v1beta1.UnimplementedDevicePluginServer

	options  AllocateOptions
	used     func(except string) map[string]int // Plugin.usedSlices
	log      *slog.Logger
	observer Observer

	list atomic.Pointer[list]
	// watchers are the open ListAndWatch streams that began after the last Register call. Each Register replaces them, so
	// older streams no longer count.
	watchers atomic.Pointer[watchers]
	begun    atomic.Int64  // ListAndWatch streams since the start
	wake     wake.Chan     // the socket or the watchers may have changed
	stopped  chan struct{} // closed to end the streams
}

var _ v1beta1.DevicePluginServer = (*server)(nil)

// watchers counts ListAndWatch streams.
type watchers struct {
	atomic.Int32

	ended chan struct{} // closed to end them
}

func newWatchers() *watchers { return &watchers{ended: make(chan struct{})} }

// list is one state of the resource's devices. It is immutable.
type list struct {
	resource resource.Resource
	devices  map[string]*device
	healthy  int
	prefer   preference
	message  *v1beta1.ListAndWatchResponse
	common   part          // what every container gets, besides the parts of its devices
	replaced chan struct{} // closed when the server has a newer list
}

// device is a device of a list.
type device struct {
	*resource.Device
	index int // in the list
	part
}

// newServer returns a server with a first list.
func newServer(
	r resource.Resource, gpus *allocator.GPUs, o AllocateOptions, used func(except string) map[string]int,
	log *slog.Logger, observer Observer,
) (*server, error) {
	s := &server{
		options: o, used: used, log: log.With("resource", r.Name), observer: observer,
		wake: wake.New(), stopped: make(chan struct{}),
	}
	s.watchers.Store(newWatchers())
	s.list.Store(&list{message: &v1beta1.ListAndWatchResponse{}, replaced: make(chan struct{})})
	return s, s.update(r, gpus)
}

// update replaces the list. When it returns, a device that is not in the new list cannot be allocated. The new list is
// sent at once, unless it equals the old one. After an error the old list stays. Calls must not overlap.
func (s *server) update(r resource.Resource, gpus *allocator.GPUs) error {
	next, err := s.newList(r, gpus)
	if err != nil {
		return err
	}
	old := s.list.Load()
	if proto.Equal(old.message, next.message) {
		// If anything differs, only the answers of Allocate do. So nothing is sent, and the streams keep waiting.
		next.replaced = old.replaced
		s.list.Store(next)
		return nil
	}
	s.list.Store(next)
	close(old.replaced)
	return nil
}

// resend sends the list to all watchers once more. Calls of resend and update must not overlap.
func (s *server) resend() {
	old := s.list.Load()
	next := *old
	next.replaced = make(chan struct{})
	s.list.Store(&next)
	close(old.replaced)
}

func (s *server) newList(r resource.Resource, gpus *allocator.GPUs) (*list, error) {
	l := &list{
		resource: r,
		devices:  make(map[string]*device, len(r.Devices)),
		message:  &v1beta1.ListAndWatchResponse{Devices: make([]*v1beta1.Device, len(r.Devices))},
		common:   s.options.commonPart(r.Grant),
		replaced: make(chan struct{}),
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		l.devices[d.ID] = &device{d, i, s.options.partOf(d.Grant)}
		l.message.Devices[i] = apiDevice(d)
		if d.Healthy {
			l.healthy++
		}
	}
	var err error
	l.prefer, err = s.options.Preference.of(&l.resource, gpus)
	return l, err
}

// apiDevice converts a device to the type of the API. If the device has no NUMA node, it gets no topology: the kubelet
// never allocates a device whose topology is empty.
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

// GetDevicePluginOptions says which optional calls the kubelet may make.
func (s *server) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return s.options.calls(), nil
}

// calls are the optional calls that the kubelet may make.
func (o *AllocateOptions) calls() *v1beta1.DevicePluginOptions {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: o.PreStart != nil}
}

// preStartTimeout is how long it may take to prepare a container's devices. The kubelet waits 30 seconds.
const preStartTimeout = 25 * time.Second

// PreStartContainer prepares the devices of a container, also those that became unhealthy after Allocate, or whose IDs
// or number are not allowed any more since a reload. The codes of its errors are those of Allocate, with
// FailedPrecondition if a container must not get the devices as they are.
func (s *server) PreStartContainer(
	ctx context.Context, req *v1beta1.PreStartContainerRequest,
) (*v1beta1.PreStartContainerResponse, error) {
	l := s.list.Load()
	devices, err := s.ofContainer(l, req.GetDevicesIds())
	if err != nil {
		s.log.Warn("a container was not started: " + status.Convert(err).Message())
		return nil, err
	}
	if s.options.PreStart == nil {
		return &v1beta1.PreStartContainerResponse{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, preStartTimeout)
	defer cancel()
	if err := s.options.PreStart(ctx, l.resource.Name, devices); err != nil { // PreStart has logged it
		return nil, status.Error(codes.FailedPrecondition, linesOf(err))
	}
	return &v1beta1.PreStartContainerResponse{}, nil
}

// linesOf returns the text of an error, with a line for each device if it is about several: device-manager finds the
// devices at the begin of the lines, since the rest can have text of users.
func linesOf(err error) string {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		err = errors.Join(several.Unwrap()...)
	}
	return err.Error()
}

// ofContainer returns the devices that a container has under IDs, some of which may not be advertised any more.
func (s *server) ofContainer(l *list, ids []string) ([]*resource.Device, error) {
	var devices []*resource.Device
	if s.options.Old != nil {
		ids = slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
			if l.devices[id] != nil {
				return false
			}
			d := s.options.Old(l.resource.Name, id)
			if d != nil {
				devices = append(devices, d)
			}
			return d != nil
		})
	}
	if len(ids) == 0 && len(devices) > 0 {
		return devices, nil
	}
	found, err := l.find(ids)
	if err != nil {
		return nil, err
	}
	for _, d := range found {
		devices = append(devices, d.Device)
	}
	return devices, nil
}

// ListAndWatch sends the list, and each later list. If lists change faster than they can be sent, only the newest is
// sent.
func (s *server) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	w := s.watchers.Load()
	w.Add(1)
	s.begun.Add(1) // after w: a stream that has begun and is not watched has ended
	s.wake.Wake()
	defer func() {
		w.Add(-1)
		s.wake.Wake()
	}()
	for {
		l := s.list.Load()
		if err := stream.Send(l.message); err != nil {
			return err
		}
		select {
		case <-l.replaced:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.stopped:
			return status.Error(codes.Unavailable, "the device plugin is stopping")
		case <-w.ended:
			return status.Error(codes.Unavailable, "the device plugin registers again")
		}
	}
}

// endWatchers ends the streams.
func (s *server) endWatchers() {
	close(s.watchers.Swap(newWatchers()).ended)
	s.wake.Wake()
}

// watched reports whether a stream is open that began after the last Register call.
func (s *server) watched() bool { return s.watchers.Load().Load() > 0 }
