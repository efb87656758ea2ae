package kubelet

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/test/lib/kubenode"
)

type (
	// Daemon is a program of a node.
	Daemon = kubenode.Daemon
	// Image is a container image.
	Image = kubenode.Image
	// Devices has the sorted IDs of devices by resource.
	Devices = kubenode.Devices
)

const (
	nodeName = "node"
	nodeIP   = "192.0.2.10"
)

// network gives the node an interface that leads nowhere: a kubelet and pods need an address.
const network = `
ip link add eth0 type veth peer name uplink
ip address add 192.0.2.10/24 dev eth0
ip link set eth0 up
ip link set uplink up
ip route add default via 192.0.2.1
`

// Node is a running node without an API server.
type Node struct{ *kubenode.Node }

// New starts a node with these images and waits until it is ready.
func New(ctx context.Context, p kubenode.Programs, images ...Image) (*Node, error) {
	n, err := kubenode.New(ctx, kubenode.Options{
		Programs: p, Name: nodeName, Address: nodeIP, Network: []string{network}, Pods: "10.88.7.0/24", Images: images,
	})
	return &Node{n}, err
}

// RemovePods removes all pods and waits for their end.
func (n *Node) RemovePods(ctx context.Context) error {
	manifests, err := os.ReadDir(n.Host(kubenode.StaticPods))
	errs := []error{err}
	for _, m := range manifests {
		errs = append(errs, os.Remove(filepath.Join(n.Host(kubenode.StaticPods), m.Name())))
	}
	return errors.Join(append(errs, n.awaitNoPods(ctx))...)
}
