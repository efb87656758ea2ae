// Package plugin serves a node's devices to the kubelet: a device plugin of API v1beta1 for each resource.
//
//	p, err := plugin.New(plugin.Options{Dir: "/var/lib/kubelet/device-plugins", ...})
//	err = p.Update(resources, gpus) // now, and whenever they change
//	err = p.Run(ctx)
//
// A resource's endpoint serves before it registers. It registers again whenever the kubelet may have lost the
// registration: the kubelet has a new socket, or the ListAndWatch stream has ended or did not begin. If its own socket
// was removed, as a kubelet does when it starts, it makes the socket again. Streams that are open continue through all
// of this.
//
// The package does not call the driver and decides nothing about devices: it advertises the resources of the last
// Update, and answers Allocate from them.
package plugin
