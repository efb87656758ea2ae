package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// callRegister calls the kubelet's Register for an endpoint. It does not leave the dial to gRPC, which pauses for a
// second after a connection that was refused.
//
// After the dial, unchanged returns whether the kubelet's socket is still the one that the call is for. If not, there
// is no call: the endpoint will register with the new kubelet anyway, and at a second registration that one would close
// the connection of the first.
func callRegister(ctx context.Context, kubeletSocket, endpoint, name string, unchanged func() bool) outcome {
	conn, err := dialKubelet(ctx, func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", kubeletSocket)
	})
	if err != nil {
		return outcome{err: fmt.Errorf("register %s: %w", name, explainMissing(err))}
	}
	defer func() { _ = conn.Close() }()
	if !unchanged() {
		return outcome{err: fmt.Errorf("register %s: the kubelet has another socket now", name)}
	}
	conns := make(chan net.Conn, 1)
	conns <- conn
	close(conns)
	client, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if c, ok := <-conns; ok {
				return c, nil
			}
			return nil, net.ErrClosed
		}))
	if err != nil {
		return outcome{err: fmt.Errorf("register %s: %w", name, err)}
	}
	defer func() { _ = client.Close() }()
	_, err = v1beta1.NewRegistrationClient(client).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: filepath.Base(endpoint), ResourceName: name, Options: options(),
	})
	// gRPC itself returns Unavailable when the connection breaks: that kubelet has ended, or its server has. After any
	// other error the kubelet may have accepted the registration. One of 1.37 also refuses what it accepted before.
	o := outcome{delivered: status.Code(err) != codes.Unavailable}
	switch {
	case err == nil:
	case ctx.Err() != nil:
		o.err = fmt.Errorf("register %s: the kubelet at %s does not answer; its log may say why: %w",
			name, kubeletSocket, context.Cause(ctx))
	default:
		o.err = fmt.Errorf("register %s: the kubelet at %s refuses: %s",
			name, kubeletSocket, status.Convert(err).Message())
	}
	return o
}

// The socket of a kubelet that starts has a file some 20 microseconds before the kubelet listens on it.
const (
	dialTries = 10
	dialPause = time.Millisecond
)

// dialKubelet dials the kubelet's socket, and again while it is refused. The limit is a number of tries, not a time: on
// a busy node a time could be over before the second try.
func dialKubelet(ctx context.Context, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	for try := 1; ; try++ {
		conn, err := dial(ctx)
		if !errors.Is(err, syscall.ECONNREFUSED) || try == dialTries {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(dialPause):
		}
	}
}

// explainMissing adds the likely cause to the error of a socket that does not exist or is not listened on.
func explainMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w; is the kubelet running?", err)
	}
	return err
}

// discovery is the service that a kubelet calls on a socket that it discovered.
type discovery struct {
	pluginregistration.UnimplementedRegistrationServer

	endpoint *endpoint
}

var _ pluginregistration.RegistrationServer = (*discovery)(nil)

// GetInfo describes the device plugin of the resource, which is on the same socket.
func (d *discovery) GetInfo(context.Context, *pluginregistration.InfoRequest) (*pluginregistration.PluginInfo, error) {
	return &pluginregistration.PluginInfo{
		Type: pluginregistration.DevicePlugin, Name: d.endpoint.name, SupportedVersions: v1beta1.SupportedVersions[:],
	}, nil
}

// NotifyRegistrationStatus records whether the kubelet accepted the plugin. A kubelet that refused tries again by
// itself.
func (d *discovery) NotifyRegistrationStatus(
	_ context.Context, s *pluginregistration.RegistrationStatus,
) (*pluginregistration.RegistrationStatusResponse, error) {
	if s.GetPluginRegistered() {
		d.endpoint.accepted()
	} else {
		d.endpoint.refused(errors.New("the kubelet refused it: " + s.GetError()))
	}
	return &pluginregistration.RegistrationStatusResponse{}, nil
}
