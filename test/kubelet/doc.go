// Package kubelet tests the programs on a Kubernetes node (test/lib/kubenode) whose kubelet has no API server and runs
// static pods.
package kubelet
