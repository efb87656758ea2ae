// Package resource computes the resources that a node advertises to the kubelet: which devices there are, under which
// resource names, and how many replicas of each.
//
// The result depends only on the snapshot of the driver and on the configuration. Of the device plugin API, the
// package knows only how large messages may be.
//
//	resources, findings, err := resource.Build(snapshot, config)
//
// A device is in at most one resource, so device IDs are unique on a node.
package resource
