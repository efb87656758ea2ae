// Package resource decides what a node offers to the kubelet: which of its devices, under which resource names, and in
// how many replicas.
//
// It is a pure function of what the driver says and of the configuration; it asks nobody and touches nothing. Of the
// device plugin's messages it knows only how large they become.
//
//	resources, findings, err := resource.Build(snapshot, config)
//
// A device is in one resource at most, so an ID occurs once on a node.
package resource
