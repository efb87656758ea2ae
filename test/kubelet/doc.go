// Package kubelet runs a Kubernetes node for the tests: containerd and a kubelet that has no API server and runs static
// pods. Both are the real programs, from pinned modules (test/peers).
//
// A node is in namespaces of its own, for mounts, processes and the network, and all that it writes is in one temporary
// directory. So several run beside each other, the machine's own kubelet, container runtime, networks and kernel
// settings are left alone, and a test that is killed leaves no process: the namespaces end with it.
package kubelet
