// Package dra offers a node's devices by dynamic resource allocation (DRA): it publishes them in ResourceSlices, which
// the scheduler reads, and prepares the ResourceClaims of pods for the kubelet.
//
// Slices makes the ResourceSlices of a published state; it is pure. A Publisher keeps the API server's slices equal to
// them. A Driver has a Publisher, and prepares claims: it reads the claim, checks the devices that the scheduler chose,
// takes them in the ledger, and keeps one record for each claim.
//
// Containers get the CDI names of the node's spec. A claim has no CDI file of its own, so none is lost at a reboot.
//
// The package does not call the driver and decides nothing about devices: of the core it knows the published state. A
// device's name in the API is its UUID in lower case. A claim is bound to a name before the node knows of it, so the
// name must never mean another device, as an index does after a GPU was replaced.
package dra
