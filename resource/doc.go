// Package resource computes what a node offers to the kubelet: which of its devices, under which resource names, and in
// how many replicas.
//
// The result depends only on the snapshot of the driver and on the configuration. Of the device plugin's messages the
// package knows only their sizes.
//
//	resources, findings, err := resource.Build(snapshot, config)
//
// A device is in one resource at most, so device IDs are unique on a node.
package resource
