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

// register calls the kubelet's Register for an endpoint. It dials by itself: gRPC would wait for a second after a
// connection that was refused.
//
// Between the dial and the call, register asks same whether the kubelet's socket is still the one that the call is for.
// If not, the endpoint registers with the next kubelet anyway; a second registration would have that one close the
// first connection when the second is there.
func register(ctx context.Context, kubeletSocket, endpoint, name string, same func() bool) outcome {
	conn, err := dialKubelet(ctx, func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", kubeletSocket)
	})
	if err != nil {
		return outcome{err: fmt.Errorf("register %s: %w", name, askForKubelet(err))}
	}
	defer func() { _ = conn.Close() }()
	if !same() {
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

// dialKubelet dials the kubelet's socket, several times while it is refused. It counts the tries and not the time: on a
// busy node the time could be over before the second try.
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

// askForKubelet adds a question to the error of a socket that does not exist or that nobody listens on.
func askForKubelet(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w; is the kubelet running?", err)
	}
	return err
}

// discovery is the service by which a kubelet that discovered an endpoint's socket learns what it is.
type discovery struct {
	pluginregistration.UnimplementedRegistrationServer

	endpoint *endpoint
}

var _ pluginregistration.RegistrationServer = (*discovery)(nil)

// GetInfo returns that the same socket serves the resource as a device plugin.
func (d *discovery) GetInfo(context.Context, *pluginregistration.InfoRequest) (*pluginregistration.PluginInfo, error) {
	return &pluginregistration.PluginInfo{
		Type: pluginregistration.DevicePlugin, Name: d.endpoint.name, SupportedVersions: v1beta1.SupportedVersions[:],
	}, nil
}

// NotifyRegistrationStatus takes the kubelet's decision. A kubelet that refused tries again by itself.
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
