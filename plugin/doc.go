// Package plugin serves a node's devices to the kubelet, as device plugins of API v1beta1, one for each resource.
//
//	p, err := plugin.New(plugin.Options{Dir: "/var/lib/kubelet/device-plugins", ...})
//	err = p.Update(resources) // now, and whenever they change
//	err = p.Run(ctx)
//
// A resource's endpoint serves before it registers, and registers again whenever the kubelet may have forgotten it: the
// kubelet's socket was made anew, the ListAndWatch stream ended or never came. It puts its own socket back when that was
// removed, which a starting kubelet does. Nothing else on the node is disturbed by that, streams that are open included.
//
// The package asks no driver and decides nothing about devices: what is listed is what Update was given last, and an
// Allocate is answered from that and from the CDI spec on disk.
package plugin
