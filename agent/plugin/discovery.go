package plugin

import (
	"context"
	"errors"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// stayDiscovered keeps the endpoint available to a kubelet that finds the socket in its registry directory. If the
// kubelet does not begin to watch in time, or a watch has ended, a new socket is made: a kubelet that has found a
// socket does not connect to it again. Kubelets before 1.37 end the watch when another instance ends.
func (e *endpoint) stayDiscovered(ctx context.Context) error {
	var seen int64
	for {
		// A stream may begin and end before it is looked for.
		begun := func() bool { return e.server.begun.Load() != seen }
		if err := e.maintainUntil(ctx, e.opts.streamGrace, begun); err != nil {
			return err
		}
		if begun() {
			seen = e.server.begun.Load()
			if err := e.watch(ctx, func() bool { return !e.server.watched() }); err != nil {
				return err
			}
		} else {
			e.setReason(errNotWatched)
		}
		if e.opts.retired.Load() {
			return e.maintainUntil(ctx, forever, func() bool { return false })
		}
		if err := e.socket.Renew(ctx); err != nil {
			e.setReason(err)
		}
	}
}

// discovery is the registration service that the kubelet calls on a socket that it has found.
type discovery struct {
	pluginregistration.UnimplementedRegistrationServer

	endpoint *endpoint
}

var _ pluginregistration.RegistrationServer = (*discovery)(nil)

// GetInfo describes the device plugin of the resource, which serves the same socket.
func (d *discovery) GetInfo(context.Context, *pluginregistration.InfoRequest) (*pluginregistration.PluginInfo, error) {
	return &pluginregistration.PluginInfo{
		Type: pluginregistration.DevicePlugin, Name: d.endpoint.name, SupportedVersions: v1beta1.SupportedVersions[:],
	}, nil
}

// NotifyRegistrationStatus records whether the kubelet accepted the plugin. If it did not, it will try again.
func (d *discovery) NotifyRegistrationStatus(
	_ context.Context, s *pluginregistration.RegistrationStatus,
) (*pluginregistration.RegistrationStatusResponse, error) {
	var err error
	if !s.GetPluginRegistered() {
		err = errors.New("the kubelet refused the registration: " + s.GetError())
	}
	d.endpoint.registered(err)
	return &pluginregistration.RegistrationStatusResponse{}, nil
}
