// Package kubenode runs Kubernetes nodes for the tests: a kubelet and containerd, both the real programs, from pinned
// modules (test/peers).
//
// A node has its own namespaces for mounts, processes and the network, and one temporary directory for all that it
// writes. So several nodes can run side by side; the machine's own kubelet, container runtime, networks and kernel
// settings do not change; and a killed test leaves no process, since the namespaces end with it.
//
// The node has the machine's version of control groups. A machine in hybrid mode (controllers of version 1, and a tree
// of version 2 without controllers) cannot have a node of version 2: the kubelet refuses that tree ("some missing
// controllers"), and runc cannot set the CPU weight of a pod. On such a machine test/e2e covers containers under
// version 2, since device rules need no controller there.
package kubenode
