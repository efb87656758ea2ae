package endpoint

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/model"
)

const maxList = 64 << 20 // bytes of a ListAndWatch message

// Endpoint is an instance of a resource's plugin. Its methods may be called concurrently. Once the stream of the
// plugin has ended, they return an error that wraps ErrStopped.
type Endpoint struct {
	resource string
	socket   string
	log      *slog.Logger
	options  *v1beta1.DevicePluginOptions
	limits   Deadlines

	conn   *grpc.ClientConn
	client v1beta1.DevicePluginClient
	ctx    context.Context // ends at close
	cancel context.CancelFunc

	// Guarded by the registry's mutex.
	listed  bool // whether a list has arrived
	devices []model.Device
}

// stopped returns an endpoint whose stream has ended.
func stopped(resource string) *Endpoint {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return &Endpoint{resource: resource, options: &v1beta1.DevicePluginOptions{}, ctx: ctx, cancel: cancel}
}

// close ends the stream and all calls.
func (e *Endpoint) close() {
	e.cancel()
	if e.conn != nil {
		_ = e.conn.Close()
	}
}

// Socket returns the path of the plugin's socket, or "" if no plugin has registered since the manager started.
func (e *Endpoint) Socket() string { return e.socket }

// Options returns the plugin's response to GetDevicePluginOptions. The caller must not change it.
func (e *Endpoint) Options() *v1beta1.DevicePluginOptions { return e.options }

// checkStream returns an error that wraps ErrStopped, with the kubelet's text, if the stream has ended.
func (e *Endpoint) checkStream() error {
	if e.ctx.Err() != nil {
		return fmt.Errorf("endpoint %v %w", e.resource, ErrStopped)
	}
	return nil
}

// Allocate calls Allocate for one container. The result is nil if the plugin's response has nothing for the container.
// Errors of the call are a *PluginError.
func (e *Endpoint) Allocate(ctx context.Context, ids []string) (*v1beta1.ContainerAllocateResponse, error) {
	if err := e.checkStream(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, e.limits.Allocate)
	defer cancel()
	response, err := e.client.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil || len(response.GetContainerResponses()) == 0 {
		return nil, pluginError(ctx, err)
	}
	return response.GetContainerResponses()[0], nil
}

// Preferred calls GetPreferredAllocation for one container and returns the IDs in the response, which may be wrong.
// Errors of the call are a *PluginError.
func (e *Endpoint) Preferred(ctx context.Context, available, mustInclude []string, size int) ([]string, error) {
	if err := e.checkStream(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, e.limits.Preferred)
	defer cancel()
	response, err := e.client.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: available, MustIncludeDeviceIDs: mustInclude, AllocationSize: int32(size),
		}},
	})
	if err != nil || len(response.GetContainerResponses()) == 0 {
		return nil, pluginError(ctx, err)
	}
	return response.GetContainerResponses()[0].GetDeviceIDs(), nil
}

// PreStart calls PreStartContainer. Errors of the call are a *PluginError.
func (e *Endpoint) PreStart(ctx context.Context, ids []string) error {
	if err := e.checkStream(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, e.limits.PreStart)
	defer cancel()
	_, err := e.client.PreStartContainer(ctx, &v1beta1.PreStartContainerRequest{DevicesIds: ids})
	return pluginError(ctx, err)
}

// maxError bounds the text of a plugin's error, and maxMessage the message that is kept of it, in bytes. A plugin has a
// line for each device that it refuses.
const (
	maxError   = 1000
	maxMessage = 64 << 10
)

// PluginError is the error of a call of a plugin. Its text is what the plugin says, without the code of gRPC before it.
type PluginError struct {
	Code    codes.Code
	Message string // at most maxMessage bytes
}

// Error returns the begin of the message, or the code if there is none.
func (e *PluginError) Error() string {
	return wording.Shorten(cmp.Or(e.Message, e.Code.String()), maxError)
}

// GRPCStatus returns the error as one of gRPC, so that status.Code returns the code.
func (e *PluginError) GRPCStatus() *status.Status {
	return status.New(e.Code, wording.Shorten(e.Message, maxError))
}

// pluginError returns an error of gRPC as a *PluginError, and any other as it is.
func pluginError(ctx context.Context, err error) error {
	s, ok := status.FromError(err)
	deadline, limited := ctx.Deadline()
	switch {
	case err == nil || !ok:
		return err
	case limited && !time.Now().Before(deadline): // gRPC has several texts for that, also before ctx ends
		return &PluginError{codes.DeadlineExceeded, "the device plugin did not answer in time"}
	}
	return &PluginError{s.Code(), wording.Shorten(s.Message(), maxMessage)}
}

// watch calls the function `receive` with each list until the stream ends. While the function runs, no other list is
// received.
func (e *Endpoint) watch(receive func([]model.Device)) error {
	stream, err := e.client.ListAndWatch(e.ctx, &v1beta1.Empty{},
		grpc.MaxCallRecvMsgSize(maxList), grpc.ForceCodecV2(newListCodec()))
	if err != nil {
		return err
	}
	reported := ""
	for {
		list, err := stream.Recv()
		if err != nil {
			return pluginError(e.ctx, err)
		}
		if err := checkIDs(list.GetDevices()); err != nil {
			return err
		}
		devices, problems := normalise(list.GetDevices())
		if problems != "" && problems != reported {
			e.log.Warn("the device plugin's list is used, but breaks the rules of the API: " + problems)
		}
		reported = problems
		receive(devices)
	}
}
