package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// socket is a plugin's socket. Neither links nor ".." in its name can lead out of dir.
type socket struct {
	dir  string
	name string // relative to dir
}

func (s socket) path() string { return filepath.Join(s.dir, s.name) }

// open opens the socket's file. The returned file stays the same, whatever is at the path later.
func (s socket) open() (*os.File, error) {
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(s.name, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if info.Mode().Type() != fs.ModeSocket {
		return nil, errors.Join(&fs.PathError{Op: "connect to", Path: s.path(), Err: unix.ENOTSOCK}, f.Close())
	}
	return f, nil
}

// check returns an error if no plugin can be at the socket. A missing socket is no error: it may be made later.
func (s socket) check() error {
	f, err := s.open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}

func (s socket) connect(ctx context.Context) (net.Conn, error) {
	f, err := s.open()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return new(net.Dialer).DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}

// dial connects to the server at the socket, within a time limit. If the server has not started yet, dial waits for
// it. A broken connection is not made again, since another instance may have the socket by then.
func (s socket) dial(ctx context.Context, limit time.Duration) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var connected atomic.Bool
	retry := backoff.DefaultConfig
	retry.BaseDelay = 50 * time.Millisecond
	conn, err := grpc.NewClient("passthrough:///plugin",
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: limit}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			if connected.Load() {
				return nil, errors.New("the device plugin has closed the connection")
			}
			return s.connect(ctx)
		}))
	if err != nil {
		return nil, err
	}
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if state == connectivity.Idle {
			conn.Connect()
		}
		if !conn.WaitForStateChange(ctx, state) {
			return nil, errors.Join(ctx.Err(), conn.Close())
		}
	}
	connected.Store(true)
	return conn, nil
}

// connect connects to a plugin and gets its options. Errors have the kubelet's texts, without the codes of gRPC.
func (r *Registry) connect(ctx context.Context, resource string, s socket) (*Endpoint, error) {
	conn, err := s.dial(ctx, r.opts.Deadlines.Dial)
	if err != nil {
		return nil, fmt.Errorf("failed to dial device plugin: %w", err)
	}
	e := &Endpoint{
		resource: resource, socket: s.path(), conn: conn, client: v1beta1.NewDevicePluginClient(conn),
		log:    r.opts.Log.With("resource", resource, "socket", s.path()),
		limits: r.opts.Deadlines,
	}
	e.ctx, e.cancel = context.WithCancel(r.ctx)
	ctx, cancel := context.WithTimeout(ctx, e.limits.Options)
	defer cancel()
	if e.options, err = e.client.GetDevicePluginOptions(ctx, &v1beta1.Empty{}); err != nil {
		e.close()
		return nil, fmt.Errorf("failed to get device plugin options: %w", pluginError(ctx, err))
	}
	return e, nil
}

// register connects to a plugin and adds it to the instances of its resource.
func (r *Registry) register(ctx context.Context, resource string, s socket) (*Endpoint, error) {
	e, err := r.connect(ctx, resource, s)
	if err != nil {
		return nil, err
	}
	if err := r.adopt(e); err != nil {
		e.close()
		return nil, err
	}
	e.log.Info("the device plugin has registered")
	if r.opts.OnRegister != nil {
		r.opts.OnRegister(resource)
	}
	return e, nil
}
