// Package podresources serves the kubelet's PodResources service (k8s.io/kubelet/pkg/apis/podresources), versions v1
// and v1alpha1, on a unix socket. Monitoring agents read there which devices exist and which containers have them.
package podresources

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
)

// The kubelet's limits on the rate of calls, for all calls together.
const (
	callsPerSecond = 100
	callsAtOnce    = 10
)

// Limits on what clients can use.
const (
	maxConnections = 64       // see unixsocket.HTTPOptions
	maxCalls       = 16       // concurrent calls of a connection
	maxRequest     = 16 << 10 // bytes; the largest request has the names of a pod and its namespace
	handshakeTime  = 5 * time.Second
	idleTime       = time.Minute // how long an idle connection stays open; clients connect again by themselves
	dialTime       = time.Second
)

// Manager has the methods of the device manager that the service needs. See manager.Manager.
type Manager interface {
	Pods() []model.Placement
	Resources() []manager.Resource
}

var _ Manager = (*manager.Manager)(nil)

// Server implements the service.
type Server struct {
	Manager Manager
	// OnCall is called for each call that the rate limit lets through, with its full gRPC name and its error; optional.
	OnCall func(method string, err error)
}

// Listen makes the socket at path, with the lock file path.lock. The owner may connect, and also the group with the
// given GID, unless that is unixsocket.OwnerOnly. The error wraps fileio.ErrHeld if another manager or the kubelet
// serves the socket.
func Listen(ctx context.Context, path string, group int) (*unixsocket.HTTPListener, error) {
	// The kubelet takes no lock. So a connection shows whether the kubelet serves the socket.
	if c, err := (&net.Dialer{Timeout: dialTime}).DialContext(ctx, "unix", path); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("make the PodResources socket %s: another program already serves it: %w", path, fileio.ErrHeld)
	}
	l, err := unixsocket.ListenHTTP(ctx, unixsocket.HTTPOptions{
		Path: path, LockPath: path + ".lock", Group: group, MaxConnections: maxConnections,
	})
	if err != nil {
		return nil, fmt.Errorf("make the PodResources socket: %w", err)
	}
	return l, nil
}

// Run serves until ctx ends, and removes the socket.
func (s *Server) Run(ctx context.Context, l *unixsocket.HTTPListener) error {
	server := grpc.NewServer(
		grpc.ChainUnaryInterceptor(limit(rate.NewLimiter(callsPerSecond, callsAtOnce)), s.observe),
		grpc.MaxConcurrentStreams(maxCalls),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idleTime}),
		grpc.WaitForHandlers(true),
	)
	v1.RegisterPodResourcesListerServer(server, service{server: s})
	v1alpha1.RegisterPodResourcesListerServer(server, alpha{server: s})
	end := context.AfterFunc(ctx, server.Stop)
	err := server.Serve(l.Socket())
	if !end() {
		err = nil // Stop was called
	}
	server.Stop()
	if err := errors.Join(err, l.Close()); err != nil {
		return fmt.Errorf("serve PodResources: %w", err)
	}
	return nil
}

// limit returns an interceptor that rejects calls above the rate limit, like the kubelet.
func limit(limiter *rate.Limiter) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if !limiter.Allow() {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		return handler(ctx, req)
	}
}

// observe calls OnCall for each call, before the response is sent.
func (s *Server) observe(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	response, err := handler(ctx, req)
	if s.OnCall != nil {
		s.OnCall(info.FullMethod, err)
	}
	return response, err
}

type service struct {
	v1.UnimplementedPodResourcesListerServer

	server *Server
}

// List returns all pods in the order of admission.
func (s service) List(context.Context, *v1.ListPodResourcesRequest) (*v1.ListPodResourcesResponse, error) {
	response := &v1.ListPodResourcesResponse{}
	for _, p := range s.server.Manager.Pods() {
		response.PodResources = append(response.PodResources, podOf(p))
	}
	return response, nil
}

// Get returns the pod with that name and namespace. If several pods have them, it returns the one that was admitted
// last.
func (s service) Get(_ context.Context, r *v1.GetPodResourcesRequest) (*v1.GetPodResourcesResponse, error) {
	var found *v1.PodResources
	for _, p := range s.server.Manager.Pods() {
		if p.Pod.Name == r.GetPodName() && p.Pod.Namespace == r.GetPodNamespace() {
			found = podOf(p)
		}
	}
	if found == nil {
		// Like the kubelet's, this error has the code Unknown.
		return nil, fmt.Errorf("pod %s in namespace %s not found", r.GetPodName(), r.GetPodNamespace())
	}
	return &v1.GetPodResourcesResponse{PodResources: found}, nil
}

// GetAllocatableResources returns the healthy devices, whether they are allocated or not.
func (s service) GetAllocatableResources(
	context.Context, *v1.AllocatableResourcesRequest,
) (*v1.AllocatableResourcesResponse, error) {
	response := &v1.AllocatableResourcesResponse{}
	for _, r := range s.server.Manager.Resources() {
		for _, d := range r.Devices {
			if r.Connected && d.Health == manager.Healthy && !d.Withheld {
				response.Devices = append(response.Devices, devicesOf(r.Name, d.ID, d.NUMA)...)
			}
		}
	}
	return response, nil
}

type alpha struct {
	v1alpha1.UnimplementedPodResourcesListerServer

	server *Server
}

// List returns all pods in the order of admission, without their init containers and without NUMA nodes.
func (a alpha) List(context.Context, *v1alpha1.ListPodResourcesRequest) (*v1alpha1.ListPodResourcesResponse, error) {
	response := &v1alpha1.ListPodResourcesResponse{}
	for _, p := range a.server.Manager.Pods() {
		pod := &v1alpha1.PodResources{Name: p.Pod.Name, Namespace: p.Pod.Namespace}
		for _, c := range p.Pod.Containers {
			container := &v1alpha1.ContainerResources{Name: c.Name}
			for _, d := range containerOf(p, c.Name).Devices {
				container.Devices = append(container.Devices, &v1alpha1.ContainerDevices{
					ResourceName: d.ResourceName, DeviceIds: d.DeviceIds,
				})
			}
			pod.Containers = append(pod.Containers, container)
		}
		response.PodResources = append(response.PodResources, pod)
	}
	return response, nil
}
