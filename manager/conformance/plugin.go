package conformance

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/wording"
)

const (
	// maxMessage is the size of the largest message that is received, in bytes. It is above the kubelet's limit, so
	// that a list beyond that limit can be received and reported.
	maxMessage = 64 << 20
	// maxLists is how many lists of a stream are received.
	maxLists = 64
)

// plugin is one connection to a plugin of one resource.
type plugin struct {
	resource string // empty if Options.Socket is set
	socket   string
	request  *v1beta1.RegisterRequest // nil if the plugin did not call Register
	intro    *introduction            // nil if there is no registry
	refused  error                    // why the socket refused connections when the plugin registered
	timeout  time.Duration
	conn     *grpc.ClientConn
	client   v1beta1.DevicePluginClient

	options    *v1beta1.DevicePluginOptions
	optionsErr error
	watch      *watch
	earlier    []*watch // the plugin's streams that have ended

	answers []answer // of Allocate, see allocateEach
	trials  []trial  // of GetPreferredAllocation, see preferredAnswers
}

// newConn returns a connection to a socket. It is made at the first call.
func newConn(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, fmt.Errorf("connect to the plugin at %s: %w", socket, err)
	}
	return conn, nil
}

func connect(resource, socket string, timeout time.Duration) (*plugin, error) {
	conn, err := newConn(socket)
	if err != nil {
		return nil, err
	}
	return &plugin{
		resource: resource, socket: socket, timeout: timeout, conn: conn, client: v1beta1.NewDevicePluginClient(conn),
	}, nil
}

// open gets the plugin's options and begins to watch its devices, like the kubelet. The watch ends when ctx ends.
func (p *plugin) open(ctx context.Context) {
	p.options, p.optionsErr = p.getOptions(ctx)
	p.watch = p.startWatch(ctx)
}

func (p *plugin) close() {
	if p.watch != nil {
		p.watch.close()
	}
	_ = p.conn.Close() // closing twice is harmless
	if p.intro != nil {
		_ = p.intro.conn.Close() // as above
	}
}

func (p *plugin) getOptions(ctx context.Context) (*v1beta1.DevicePluginOptions, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	return p.client.GetDevicePluginOptions(ctx, &v1beta1.Empty{}, grpc.WaitForReady(true))
}

// answering returns an error if the plugin no longer answers. It is used after calls that may have harmed the plugin.
func (p *plugin) answering(ctx context.Context) error {
	if _, err := p.getOptions(ctx); err != nil {
		return fmt.Errorf("afterwards GetDevicePluginOptions: %s", reason(err, p.timeout))
	}
	return nil
}

// reason returns the text of an RPC's error, which is not longer than a few hundred bytes.
func reason(err error, limit time.Duration) string {
	if hung(err) {
		return fmt.Sprintf("no answer within %s", limit)
	}
	return fmt.Sprintf("error %s %q", status.Code(err), wording.Shorten(status.Convert(err).Message(), maxQuoted))
}

// hung reports whether a call ended at its deadline, and crashed whether it lost its connection. Neither counts as a
// response.
func hung(err error) bool    { return status.Code(err) == codes.DeadlineExceeded }
func crashed(err error) bool { return status.Code(err) == codes.Unavailable }

// watch is a ListAndWatch stream.
type watch struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each list, and at the end
	lists   []*v1beta1.ListAndWatchResponse
	ended   error
}

func (p *plugin) startWatch(ctx context.Context) *watch {
	ctx, cancel := context.WithCancel(ctx)
	w := &watch{cancel: cancel, done: make(chan struct{}), changed: make(chan struct{})}
	go func() {
		defer close(w.done)
		stream, err := p.client.ListAndWatch(ctx, &v1beta1.Empty{}, grpc.WaitForReady(true))
		if err != nil {
			w.received(nil, err)
			return
		}
		for range maxLists {
			list, err := stream.Recv()
			w.received(list, err)
			if err != nil {
				return
			}
		}
		<-ctx.Done()
	}()
	return w
}

func (w *watch) received(list *v1beta1.ListAndWatchResponse, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.ended = err
	} else {
		w.lists = append(w.lists, list)
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *watch) close() {
	w.cancel()
	<-w.done
}

// state returns the lists that were received so far, a channel that is closed at the next change, and the error with
// which the stream ended.
func (w *watch) state() ([]*v1beta1.ListAndWatchResponse, chan struct{}, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.lists), w.changed, w.ended
}

// await waits for a list for which `fits` returns true. The error says why none arrived.
func (w *watch) await(ctx context.Context, limit time.Duration, fits func(*v1beta1.ListAndWatchResponse) bool) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		lists, changed, ended := w.state()
		switch {
		case slices.ContainsFunc(lists, fits):
			return nil
		case ended != nil:
			return fmt.Errorf("the stream ended: %s", reason(ended, limit))
		}
		select {
		case <-changed:
		case <-timer.C:
			return fmt.Errorf("none within %s", limit)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// awaitFirst waits for the first list.
func (w *watch) awaitFirst(ctx context.Context, limit time.Duration) error {
	return w.await(ctx, limit, func(*v1beta1.ListAndWatchResponse) bool { return true })
}

// devices returns the devices of the newest list.
func (p *plugin) devices() []*v1beta1.Device {
	for _, w := range append([]*watch{p.watch}, p.earlier...) {
		if lists, _, _ := w.state(); len(lists) > 0 {
			return lists[len(lists)-1].GetDevices()
		}
	}
	return nil
}

// healthy returns the distinct IDs of the healthy devices, sorted.
func (p *plugin) healthy() []string { return p.withHealth(true) }

func (p *plugin) withHealth(healthy bool) []string {
	var list []string
	for _, d := range p.devices() {
		if (d.GetHealth() == v1beta1.Healthy) == healthy {
			list = append(list, d.GetID())
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// ids returns the IDs of the devices, sorted.
func ids(devices []*v1beta1.Device) []string {
	var list []string
	for _, d := range devices {
		list = append(list, d.GetID())
	}
	slices.Sort(list)
	return list
}
