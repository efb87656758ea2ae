package plugintest

import (
	"context"
	"strconv"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// called counts a call and returns the behaviour for it.
func (p *Plugin) called(counter *int) Behaviour {
	var b Behaviour
	p.change(func() {
		*counter++
		b = p.b
	})
	return b
}

// GetDevicePluginOptions implements the API.
func (p *Plugin) GetDevicePluginOptions(ctx context.Context, _ *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	b := p.called(&p.calls.Options)
	if b.GetOptions != nil {
		if err := b.GetOptions(ctx); err != nil {
			return nil, err
		}
	}
	if b.Options == nil {
		return &v1beta1.DevicePluginOptions{}, nil
	}
	return b.Options, nil
}

// ListAndWatch implements the API.
func (p *Plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	b := p.called(&p.calls.Watch)
	defer p.called(&p.calls.Ended)
	if b.Watch != nil {
		if err := b.Watch(stream.Context()); err != nil {
			return err
		}
	}
	sent := 0
	for {
		p.mu.Lock()
		list, version, fail, changed := p.list, p.version, p.fail, p.changed
		p.mu.Unlock()
		if fail != nil {
			return fail
		}
		if version != sent {
			if err := stream.Send(list); err != nil {
				return err
			}
			sent = version
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// Allocate implements the API.
func (p *Plugin) Allocate(ctx context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	b := p.called(&p.calls.Allocate)
	response := &v1beta1.AllocateResponse{}
	for _, c := range r.GetContainerRequests() {
		answer := &v1beta1.ContainerAllocateResponse{
			Envs: map[string]string{"DEVICES": strconv.Itoa(len(c.GetDevicesIds()))},
		}
		if b.Allocate != nil {
			var err error
			if answer, err = b.Allocate(ctx, c.GetDevicesIds()); err != nil {
				return nil, err
			}
		}
		if answer != nil {
			response.ContainerResponses = append(response.ContainerResponses, answer)
		}
	}
	return response, nil
}

// GetPreferredAllocation implements the API.
func (p *Plugin) GetPreferredAllocation(
	ctx context.Context, r *v1beta1.PreferredAllocationRequest,
) (*v1beta1.PreferredAllocationResponse, error) {
	b := p.called(&p.calls.Preferred)
	response := &v1beta1.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids := c.GetAvailableDeviceIDs()
		ids = ids[:min(len(ids), int(c.GetAllocationSize()))]
		if b.Preferred != nil {
			var err error
			if ids, err = b.Preferred(ctx, c); err != nil {
				return nil, err
			}
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// PreStartContainer implements the API.
func (p *Plugin) PreStartContainer(
	ctx context.Context, r *v1beta1.PreStartContainerRequest,
) (*v1beta1.PreStartContainerResponse, error) {
	b := p.called(&p.calls.PreStart)
	if b.PreStart != nil {
		if err := b.PreStart(ctx, r.GetDevicesIds()); err != nil {
			return nil, err
		}
	}
	return &v1beta1.PreStartContainerResponse{}, nil
}

// GetInfo implements the API of the plugin watcher.
func (p *Plugin) GetInfo(ctx context.Context, _ *registration.InfoRequest) (*registration.PluginInfo, error) {
	b := p.called(&p.calls.Info)
	if b.Info != nil {
		return b.Info(ctx)
	}
	return &registration.PluginInfo{
		Type: registration.DevicePlugin, Name: p.Resource, SupportedVersions: []string{v1beta1.Version},
	}, nil
}

// NotifyRegistrationStatus implements the API of the plugin watcher.
func (p *Plugin) NotifyRegistrationStatus(
	ctx context.Context, status *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	b := p.called(&p.calls.Notify)
	if b.Notify != nil {
		if err := b.Notify(ctx, status); err != nil {
			return nil, err
		}
	}
	return &registration.RegistrationStatusResponse{}, nil
}
