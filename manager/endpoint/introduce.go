package endpoint

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/trust"
)

// introduce registers the plugin at a socket in the plugin watcher's directory: it calls GetInfo, and notifies the
// plugin of the result. Errors have the kubelet's texts, without the codes of gRPC.
func (r *Registry) introduce(ctx context.Context, s socket) (*Endpoint, error) {
	conn, err := s.dial(ctx, r.opts.Deadlines.Dial)
	if err != nil {
		return nil, fmt.Errorf("RegisterPlugin error -- dial failed at socket %s, err: failed to dial socket %s, err: %w",
			s.path(), s.path(), err)
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	infoCtx, cancel := context.WithTimeout(ctx, r.opts.Deadlines.Info)
	defer cancel()
	info, err := client.GetInfo(infoCtx, &registerapi.InfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket %s, err: %w",
			s.path(), pluginError(infoCtx, err))
	}
	e, err := r.registerAs(ctx, info, s)
	status := &registerapi.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		status.Error = "RegisterPlugin error -- " + err.Error()
	}
	notifyCtx, cancel := context.WithTimeout(ctx, r.opts.Deadlines.Notify)
	defer cancel()
	if _, failure := client.NotifyRegistrationStatus(notifyCtx, status); failure != nil {
		if e != nil {
			e.close()
		}
		return nil, errors.Join(err, fmt.Errorf(
			"RegisterPlugin error -- failed to send registration status at socket %s, err: %w",
			s.path(), pluginError(notifyCtx, failure)))
	}
	return e, err
}

// registerAs registers the plugin that info describes.
func (r *Registry) registerAs(ctx context.Context, info *registerapi.PluginInfo, s socket) (*Endpoint, error) {
	if info.GetType() != registerapi.DevicePlugin {
		return nil, fmt.Errorf("no handler registered for plugin type: %s at socket %s", info.GetType(), s.path())
	}
	if !slices.Contains(info.GetSupportedVersions(), v1beta1.Version) {
		return nil, fmt.Errorf("plugin validation failed with err: manager version, %s, is not among plugin supported "+
			"versions %v", v1beta1.Version, info.GetSupportedVersions())
	}
	if kubelet.CheckResourceName(info.GetName()) != nil {
		return nil, fmt.Errorf("plugin validation failed with err: invalid name of device plugin socket: "+
			"the ResourceName %q is invalid", info.GetName())
	}
	if path := info.GetEndpoint(); path != "" && path != s.path() {
		if !filepath.IsAbs(path) {
			return nil, fmt.Errorf("plugin validation failed with err: the endpoint %q is not an absolute path", path)
		}
		s = socket{dir: filepath.Dir(path), name: filepath.Base(path)}
		if err := trust.Dir(s.dir); err != nil {
			return nil, fmt.Errorf("plugin validation failed with err: the endpoint %q is not safe: %w", path, err)
		}
	}
	e, err := r.register(ctx, info.GetName(), s)
	if err != nil {
		return nil, fmt.Errorf("plugin registration failed with err: %w", err)
	}
	return e, nil
}
