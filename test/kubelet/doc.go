// Package kubelet runs a Kubernetes node for the tests: containerd and a kubelet that has no API server and runs static
// pods. Both are the real programs, from pinned modules (test/peers).
//
// A node is in namespaces of its own, for mounts, processes and the network, and all that it writes is in one temporary
// directory. So several run beside each other, the machine's own kubelet, container runtime, networks and kernel
// settings are left alone, and a test that is killed leaves no process: the namespaces end with it.
//
// The node has the machine's version of control groups. Where the controllers are version 1's and a version 2 tree is
// beside them (hybrid mode), a node of version 2 cannot be made of it: a controller is in one version only, so that the
// kubelet refuses the tree ("some missing controllers"), and runc cannot set a pod's share of the processor. There
// test/e2e shows containers under version 2, which need no controller for the rules of devices.
package kubelet
