package plugin

import (
	"context"
	"errors"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registry is the service by which a kubelet that found the socket learns what it is.
type registry struct {
	registration.UnimplementedRegistrationServer

	endpoint *endpoint
}

var _ registration.RegistrationServer = (*registry)(nil)

// GetInfo says that the same socket serves the resource.
func (r *registry) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.DevicePlugin, Name: r.endpoint.name, SupportedVersions: v1beta1.SupportedVersions[:],
	}, nil
}

// NotifyRegistrationStatus takes the kubelet's word. A kubelet that refused tries again by itself.
func (r *registry) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if s.GetPluginRegistered() {
		r.endpoint.accepted()
	} else {
		err := errors.New("the kubelet refused it: " + s.GetError())
		r.endpoint.opts.Observer.Registered(r.endpoint.name, err)
		r.endpoint.problem(err)
	}
	return &registration.RegistrationStatusResponse{}, nil
}
