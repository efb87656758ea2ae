// Package plugin serves a node's devices to the kubelet: a device plugin of API v1beta1 for each resource.
//
//	p, err := plugin.New(plugin.Options{Dir: "/var/lib/kubelet/device-plugins", ...})
//	err = p.Update(resources) // now, and whenever they change
//	err = p.Run(ctx)
//
// A resource's endpoint serves before it registers. It registers again whenever the kubelet may not know it any more:
// the kubelet has a new socket, or the ListAndWatch stream ended or did not begin. It restores its own socket after
// that was removed, which a starting kubelet does. None of this disturbs streams that are open.
//
// The package does not call the driver and decides nothing about devices: it advertises what Update was given last, and
// Allocate takes its response from that.
package plugin
