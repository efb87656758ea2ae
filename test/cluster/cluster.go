// Package cluster runs a Kubernetes cluster for tests and for a person (up): etcd, the API server, the controller
// manager, the scheduler, and nodes of test/lib/kubenode, each with the GPUs of another simulated machine. All are the
// real programs, from pinned modules (test/peers).
//
// The control plane has namespaces of its own, as each node has. The machine's networks do not change: kubectl and Helm
// reach the API server through a port of the machine's loopback interface.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/proc"
)

// Images that the nodes have.
const (
	// PluginImage has the programs of the release's image, under the name that the chart has by default. UpgradeImage
	// is the same image under the tag of another version.
	PluginImage  = "localhost/gpu-cdi-plugin:0.0.0"
	UpgradeTag   = "next"
	UpgradeImage = "localhost/gpu-cdi-plugin:" + UpgradeTag
	// GPUImage has a C library and busybox, for pods with GPUs. It is there as ubuntuImage too, which the guides use.
	GPUImage    = "localhost/glibc:test"
	ubuntuImage = "docker.io/library/ubuntu:24.04"
	// ToolImage has only busybox.
	ToolImage = "localhost/busybox:test"
)

// machineRoot is where each node has the files of its simulated machine. PluginImage sets the variable with which the
// programs find their GPUs there, so that the chart needs no change.
const machineRoot = "/run/machine"

// Machines are the simulated machines of the nodes.
var Machines = []string{"pcie-quad", "dgx-h100"}

// Cluster is a running cluster.
type Cluster struct {
	Nodes []*Node

	plane  *controlPlane
	client *client
}

// Node is a node of a cluster.
type Node struct {
	*kubenode.Node
	Name string
	// GPUs is the simulated machine.
	GPUs *sim.Node
}

// Programs are where a cluster finds its programs.
type Programs struct {
	// Bin is the directory of gpu-cdi-plugin, prestart-hook and launcher, Peers that of scripts/peers.
	Bin, Peers string
}

// Start starts a cluster and waits until its nodes are ready.
func Start(ctx context.Context, p Programs) (*Cluster, error) {
	c := &Cluster{Nodes: make([]*Node, len(Machines))}
	if err := c.start(ctx, p); err != nil {
		return nil, errors.Join(fmt.Errorf("start a cluster: %w", err), c.Close())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context, p Programs) error {
	programs, err := kubenode.Find(p.Peers)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gpu-cluster-images-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var images []kubenode.Image
	// Wait returns the first error of these and stops the others.
	group, ctx2 := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		c.plane, err = startControlPlane(ctx2, p.Peers)
		return err
	})
	group.Go(func() (err error) {
		images, err = makeImages(ctx2, dir, p.Bin)
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	if c.client, err = newClient(c.plane); err != nil {
		return err
	}
	group, ctx2 = errgroup.WithContext(ctx)
	for i := range Machines {
		group.Go(func() error { return c.startNode(ctx2, i, programs, images) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return c.awaitReady(ctx)
}

// makeImages makes the images of the nodes, with their root file systems in dir.
func makeImages(ctx context.Context, dir, bin string) ([]kubenode.Image, error) {
	static, glibc, plugin := filepath.Join(dir, "static"), filepath.Join(dir, "glibc"), filepath.Join(dir, "plugin")
	busybox, err := proc.Look("busybox")
	if err != nil {
		return nil, err
	}
	errs := []error{os.Mkdir(static, 0o755), os.Mkdir(glibc, 0o755), os.Mkdir(plugin, 0o755)}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	errs = append(errs, image.Build(ctx, image.Static, static), image.Build(ctx, image.Glibc, glibc),
		image.AddProgram(glibc, busybox, "/usr/bin/busybox"))
	for _, name := range []string{"gpu-cdi-plugin", "prestart-hook", "launcher"} {
		errs = append(errs, image.Copy(filepath.Join(bin, name), filepath.Join(plugin, name)))
	}
	return []kubenode.Image{
		{Name: kubenode.PauseImage, Root: static, Config: image.Config{Cmd: []string{"sleep", "2147483647"}}},
		{Name: ToolImage, Root: static, Config: image.Config{Cmd: []string{"sh"}}},
		{Name: GPUImage, Root: glibc, Config: image.Config{Cmd: []string{"sh"}}},
		{Name: PluginImage, Root: plugin, Config: image.Config{
			Entrypoint: []string{"/launcher"}, Env: []string{"GPU_CDI_ROOT=" + machineRoot},
		}},
	}, errors.Join(errs...)
}

// nodeNetwork connects a node to the bridge of the control plane, whose network namespace is $1. $2 is the name of the
// node and of its port, $3 its address.
const nodeNetwork = `
ip link add eth0 type veth peer name "$2" netns "$1"
ip address add "$3/24" dev eth0
ip link set eth0 up
ip route add default via ` + gateway + `
`

func (c *Cluster) startNode(ctx context.Context, i int, p kubenode.Programs, images []kubenode.Image) error {
	name, address := fmt.Sprintf("node%d", i+1), fmt.Sprintf("192.0.2.1%d", i+1)
	user, err := c.plane.issue("system:node:"+name, "system:nodes")
	if err != nil {
		return err
	}
	const ca, kubeconfig = "/var/lib/cluster-ca", "/var/lib/kubelet.kubeconfig"
	n, err := kubenode.New(ctx, kubenode.Options{
		Programs: p, Name: name, Address: address, Pods: fmt.Sprintf("10.88.%d.0/24", i+1), Images: images,
		Network: []string{nodeNetwork, fmt.Sprintf("/proc/%d/ns/net", c.plane.Pid()), name, address},
		Files:   map[string]string{ca: c.plane.pem, kubeconfig: c.plane.kubeconfig(user, gateway)},
		Flags:   []string{"--kubeconfig=" + kubeconfig},
		Kubelet: map[string]any{
			"registerNode": true, "address": "0.0.0.0", "staticPodPath": "",
			// The default: for so long the scheduler does not know that a node has lost its GPUs.
			"nodeStatusUpdateFrequency": "10s",
			// The default too: after so long the kubelet tries again what a driver has refused.
			"syncFrequency": "1m0s",
			"authentication": map[string]any{
				"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": false},
				"x509": map[string]any{"clientCAFile": ca},
			},
		},
	})
	if err != nil {
		return err
	}
	c.Nodes[i] = &Node{Node: n, Name: name}
	for image, tag := range map[string]string{PluginImage: UpgradeImage, GPUImage: ubuntuImage} {
		if err := n.Ctr(ctx, "images", "tag", image, tag); err != nil {
			return err
		}
	}
	for _, args := range [][]string{{"master", "nodes"}, {"up"}} {
		res, err := c.plane.Run(ctx, append([]string{"ip", "link", "set", name}, args...)...)
		if err != nil || res.Code != 0 {
			return fmt.Errorf("connect %s: %v: %w", name, res, err)
		}
	}
	m, err := sim.LoadMachine(Machines[i])
	if err != nil {
		return err
	}
	c.Nodes[i].GPUs, err = sim.Create(ctx, n.Host(machineRoot), m, sim.Options{})
	return err
}

// awaitReady waits until the nodes and the service account of pods are ready.
func (c *Cluster) awaitReady(ctx context.Context) error {
	err := kubenode.Wait(ctx, patience, "the nodes are ready", func() error {
		for _, n := range c.Nodes {
			var node struct {
				Spec   struct{ Taints []struct{ Key string } }
				Status struct {
					Conditions []struct{ Type, Status, Message string }
				}
			}
			if err := c.client.do(ctx, http.MethodGet, "/api/v1/nodes/"+n.Name, nil, &node); err != nil {
				return err
			}
			for _, condition := range node.Status.Conditions {
				if condition.Type == "Ready" && condition.Status != "True" {
					return fmt.Errorf("%s is not ready: %s", n.Name, condition.Message)
				}
			}
			if len(node.Status.Conditions) == 0 || len(node.Spec.Taints) > 0 {
				return fmt.Errorf("%s has %d conditions, and the taints %v", n.Name, len(node.Status.Conditions),
					node.Spec.Taints)
			}
		}
		return c.client.do(ctx, http.MethodGet, "/api/v1/namespaces/default/serviceaccounts/default", nil, nil)
	})
	for _, n := range c.Nodes {
		err = n.Kubelet.WithLog(err)
	}
	return err
}

// Kubeconfig returns the path of the administrator's configuration on the machine.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.plane.dir, "kubeconfig") }

// Dir returns the directory of the control plane's files and logs. It is removed with the cluster.
func (c *Cluster) Dir() string { return c.plane.dir }

// Run runs kubectl or helm as the administrator and returns its output. An exit status other than 0 is an error.
func (c *Cluster) Run(ctx context.Context, program string, args ...string) (string, error) {
	return c.run(ctx, "", append([]string{filepath.Join(c.plane.peers, program)}, args...)...)
}

// run runs a program that finds kubectl and helm in PATH.
func (c *Cluster) run(ctx context.Context, dir string, args ...string) (string, error) {
	res, err := proc.Run(ctx, proc.Cmd{Args: args, Dir: dir, Env: []string{
		"KUBECONFIG=" + c.Kubeconfig(), "HOME=" + c.plane.dir, "PATH=" + c.plane.peers + ":" + os.Getenv("PATH"),
	}})
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("%q: %v", args, res)
	}
	return res.Stdout, err
}

// Close ends all processes of the cluster and removes its files.
func (c *Cluster) Close() error {
	var errs []error
	for _, n := range c.Nodes {
		if n != nil {
			errs = append(errs, n.Close())
		}
	}
	if c.plane != nil {
		errs = append(errs, c.plane.Close())
	}
	return errors.Join(errs...)
}
