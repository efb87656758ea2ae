package conformance

import (
	"cmp"
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
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/unixsocket"
)

const (
	socketName = "kubelet.sock"
	// maxRegistrations is how many registrations are accepted between two restarts.
	maxRegistrations = 1000
	// dialPause is the pause between two attempts to connect to a socket that nothing serves yet.
	dialPause = 20 * time.Millisecond
)

// kubelet is the kubelet's side of the API. It accepts every registration, even one that a kubelet would refuse, so
// that the other rules can be checked.
type kubelet struct {
	v1beta1.UnimplementedRegistrationServer

	dir     string
	timeout time.Duration

	ctx     context.Context // until stop
	cancel  context.CancelFunc
	server  *grpc.Server
	serving sync.WaitGroup

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each registration
	begun    time.Time
	last     time.Time // the time of the last registration
	accepted []*plugin // since start
}

func (k *kubelet) socket() string { return filepath.Join(k.dir, socketName) }

// prepare checks that the directory can be used and removes the socket of an earlier kubelet.
func (k *kubelet) prepare() error {
	if _, err := os.Stat(k.dir); err != nil {
		return fmt.Errorf("use %s as the kubelet's directory: %w", k.dir, err)
	}
	conn, err := net.Dial("unix", k.socket())
	if err == nil {
		_ = conn.Close() // nothing was sent
		return fmt.Errorf("%s: %w", k.dir, ErrInUse)
	}
	if err := os.Remove(k.socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the socket of an earlier kubelet: %w", err)
	}
	return nil
}

func (k *kubelet) start(ctx context.Context) error {
	l, err := unixsocket.Listen(ctx, k.socket(), unixsocket.OwnerOnly)
	if err != nil {
		return fmt.Errorf("serve as the kubelet: %w", err)
	}
	k.ctx, k.cancel = context.WithCancel(ctx)
	k.server = grpc.NewServer(grpc.WaitForHandlers(true))
	v1beta1.RegisterRegistrationServer(k.server, k)
	k.mu.Lock()
	k.begun, k.accepted, k.changed = time.Now(), nil, make(chan struct{})
	k.mu.Unlock()
	server := k.server
	k.serving.Go(func() { _ = server.Serve(l) }) // it ends with the server
	return nil
}

// stop closes the connections to all plugins and removes the socket. It may be called again.
func (k *kubelet) stop() error {
	if k.server == nil {
		return nil
	}
	k.cancel()
	k.server.Stop()
	k.serving.Wait()
	k.server = nil
	k.mu.Lock()
	accepted := k.accepted
	k.mu.Unlock()
	for _, p := range accepted {
		p.close()
	}
	return nil
}

// sockets returns the names of the sockets in the directory, without the kubelet's own.
func (k *kubelet) sockets() ([]string, error) {
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.Type() == fs.ModeSocket && e.Name() != socketName {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// removeSockets removes the sockets of plugins, as a kubelet does when it starts.
func (k *kubelet) removeSockets() error {
	names, err := k.sockets()
	for _, name := range names {
		if e := os.Remove(filepath.Join(k.dir, name)); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// Register implements the API. It connects to the plugin before it answers, as the kubelet does.
func (k *kubelet) Register(ctx context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	socket := filepath.Join(k.dir, r.GetEndpoint())
	refused, err := awaitServer(ctx, socket, k.timeout)
	p, failure := connect(r.GetResourceName(), socket, k.timeout)
	if failure != nil {
		return nil, failure
	}
	p.request, p.refused = r, refused
	if err == nil {
		p.open(k.ctx) //nolint:contextcheck // the watch outlives the call
	} else {
		p.optionsErr = err
		p.watch = endedWatch(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.accepted) >= maxRegistrations {
		p.close()
		return nil, status.Errorf(codes.ResourceExhausted, "the plugin has registered %d times", maxRegistrations)
	}
	k.accepted = append(k.accepted, p)
	k.last = time.Now()
	close(k.changed)
	k.changed = make(chan struct{})
	if err != nil {
		return nil, fmt.Errorf("failed to dial device plugin: %w", err) // the kubelet's words
	}
	return &v1beta1.Empty{}, nil
}

func endedWatch(err error) *watch {
	w := &watch{cancel: func() {}, done: make(chan struct{}), changed: make(chan struct{}), ended: err}
	close(w.done)
	return w
}

// awaitServer waits until a socket accepts connections. It returns two errors: that of the first attempt, and that of
// the last one, which is nil if an attempt succeeded.
func awaitServer(ctx context.Context, socket string, limit time.Duration) (first, last error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for attempt := 0; ; attempt++ {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "unix", socket)
		if err == nil {
			return first, conn.Close()
		}
		if attempt == 0 {
			first = err
		}
		select {
		case <-time.After(dialPause):
		case <-ctx.Done():
			return first, err
		}
	}
}

// registered returns the newest plugin of each resource, sorted by resource, and a channel that is closed at the next
// registration.
func (k *kubelet) registered() ([]*plugin, chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	byName := map[string]*plugin{}
	for _, p := range k.accepted {
		byName[p.resource] = p
	}
	return slices.SortedFunc(maps.Values(byName), byResource), k.changed
}

func byResource(a, b *plugin) int { return cmp.Compare(a.resource, b.resource) }

// await waits until all the resources have registered, or any resource if none are given. Then it waits until no
// registration follows for a while: a plugin that is about to register again is not ready for the next step. If a
// stream has ended, that while is longer: a plugin that starts a new server for each of two kubelets may have
// registered with the first one. The result says whether the resources have registered within the time limit.
func (k *kubelet) await(ctx context.Context, resources []string) ([]*plugin, bool) {
	timer := time.NewTimer(k.timeout)
	defer timer.Stop()
	for {
		list, changed := k.registered()
		complete := len(list) > 0 && subset(resources, names(list))
		var settled <-chan time.Time
		ended := slices.ContainsFunc(list, listEnded)
		switch {
		case complete && ended:
			settled = time.After(k.timeout / 2)
		case complete:
			settled = time.After(k.timeout / 20)
		}
		select {
		case <-changed:
		case <-settled:
			if ended || !slices.ContainsFunc(list, listEnded) {
				return list, true
			}
		case <-timer.C:
			return list, complete
		case <-ctx.Done():
			return list, complete
		}
	}
}

func listEnded(p *plugin) bool {
	_, _, ended := p.watch.state()
	return ended != nil
}

// took returns the time from the start to the last registration.
func (k *kubelet) took() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.last.Sub(k.begun).Round(time.Millisecond)
}

func names(plugins []*plugin) []string {
	var list []string
	for _, p := range plugins {
		list = append(list, p.resource)
	}
	return list
}
