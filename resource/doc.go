// Package resource computes the resources that a node advertises to the kubelet: which devices, under which resource
// names, and in how many replicas.
//
// The result depends only on the snapshot of the driver and on the configuration. The package knows the device plugin
// API only through the sizes of its messages.
//
//	resources, findings, err := resource.Build(snapshot, config)
//
// A device is in at most one resource, so device IDs are unique on a node.
package resource
