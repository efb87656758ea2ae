package endpoint

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"gpu-cdi-plugin/internal/kubelet"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Limits of the server at kubelet.sock. A plugin closes its connection after the registration, which takes at most the
// deadlines for Dial and Options.
const (
	maxConnections = 256
	maxStreams     = 16      // per connection
	maxRequest     = 1 << 16 // bytes
	handshakeTime  = 2 * time.Second
	connectionIdle = 10 * time.Second
	connectionAge  = time.Minute
)

// registration implements the service on kubelet.sock.
type registration struct {
	v1beta1.UnimplementedRegistrationServer
	registry *Registry
}

func newServer(r *Registry) *grpc.Server {
	server := grpc.NewServer(
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: connectionIdle, MaxConnectionAge: connectionAge, MaxConnectionAgeGrace: connectionAge,
		}))
	v1beta1.RegisterRegistrationServer(server, &registration{registry: r})
	return server
}

// Register implements the API. Errors have the kubelet's texts and code. Unlike the kubelet, it refuses an endpoint
// outside the directory.
func (s *registration) Register(ctx context.Context, req *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	if err := s.register(ctx, req); err != nil {
		s.registry.opts.Log.Warn("a device plugin's registration failed",
			"resource", req.GetResourceName(), "endpoint", req.GetEndpoint(), "error", err)
		return nil, status.Error(codes.Unknown, err.Error())
	}
	return &v1beta1.Empty{}, nil
}

func (s *registration) register(ctx context.Context, req *v1beta1.RegisterRequest) error {
	if !slices.Contains(v1beta1.SupportedVersions[:], req.GetVersion()) {
		return fmt.Errorf("requested API version %q is not supported by kubelet. Supported version is %q",
			req.GetVersion(), v1beta1.SupportedVersions)
	}
	if kubelet.CheckResourceName(req.GetResourceName()) != nil {
		return fmt.Errorf("the ResourceName %q is invalid", req.GetResourceName())
	}
	at := socket{dir: s.registry.opts.SocketDir, name: req.GetEndpoint()}
	if !filepath.IsLocal(at.name) {
		return fmt.Errorf("the endpoint %q is not the name of a socket in %s", at.name, at.dir)
	}
	if err := at.check(); err != nil {
		return fmt.Errorf("the endpoint %q is not the name of a socket in %s: %w", at.name, at.dir, err)
	}
	_, err := s.registry.register(ctx, req.GetResourceName(), at)
	return err
}
