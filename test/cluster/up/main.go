// Command up starts a cluster for a person, prints what to try, and removes the cluster on SIGINT and SIGTERM, and when
// its input ends. It is what `make cluster` runs, from the root of the repository.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"gpu-cdi-plugin/test/cluster"
)

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

const pod = `apiVersion: v1
kind: Pod
metadata: {name: gpu}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: ` + cluster.GPUImage + `
      command: [sh, -c, "nvidia-smi -L; sleep 1000000"]
      resources: {limits: {nvidia.com/gpu: 2}}
`

// guide is what to try. Its words in braces are replaced.
const guide = `
In another shell, here ({dir}):

  export KUBECONFIG={kubeconfig} PATH={peers}:$PATH
  kubectl get nodes

Install the plugin, and see the GPUs of both nodes (the kubelet reports them within 10 s):

  helm -n kube-system install gpu-cdi-plugin deploy/chart
  kubectl -n kube-system rollout status daemonset/gpu-cdi-plugin
  kubectl get nodes -w -o custom-columns='NODE:.metadata.name,GPUS:.status.allocatable.nvidia\.com/gpu'

A pod with two GPUs:

  kubectl apply -f {pod}
  kubectl wait --for=condition=Ready pod/gpu && kubectl logs gpu

The GPUs of one of the nodes, and its GPU 0 out of service and back:

  kubectl -n kube-system exec daemonset/gpu-cdi-plugin -- /launcher run devices
  kubectl -n kube-system exec daemonset/gpu-cdi-plugin -- /launcher run device cordon 0 --reason "a fan is loud"
  kubectl -n kube-system exec daemonset/gpu-cdi-plugin -- /launcher run device uncordon 0

GPU 1 of {node} falls off the bus, and works again:

  bin/gpu-sim fault {machine} lost --gpu 1
  bin/gpu-sim fault {machine} clear

Upgrade under the running pod, then remove everything:

  helm -n kube-system upgrade gpu-cdi-plugin deploy/chart --reuse-values --set image.tag={tag}
  kubectl delete pod gpu
  helm -n kube-system upgrade gpu-cdi-plugin deploy/chart --reuse-values --set cleanup=true
  kubectl -n kube-system rollout status daemonset/gpu-cdi-plugin
  helm -n kube-system uninstall gpu-cdi-plugin

Logs of the programs: {logs}
Ctrl-C ends the cluster and removes all of its files.
`

func run(in io.Reader, out io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	bin, err := filepath.Abs("bin")
	if err != nil {
		return err
	}
	peers := filepath.Join(bin, "peers")
	fmt.Fprintln(out, "Starting etcd, the API server, the controller manager, the scheduler and two nodes ...")
	begin := time.Now()
	c, err := cluster.Start(ctx, cluster.Programs{Bin: bin, Peers: peers})
	if err != nil {
		return err
	}
	defer func() {
		if err := c.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "error: remove the cluster:", err)
		}
	}()
	example := filepath.Join(c.Dir(), "gpu.yaml")
	if err := os.WriteFile(example, []byte(pod), 0o600); err != nil {
		return err
	}
	fmt.Fprintf(out, "Ready after %.0f s. Images on both nodes: %s, %s, %s, %s.\n", time.Since(begin).Seconds(),
		cluster.PluginImage, cluster.UpgradeImage, cluster.GPUImage, cluster.ToolImage)
	logs := []string{filepath.Join(c.Dir(), "*.log")}
	for i, n := range c.Nodes {
		fmt.Fprintf(out, "%s is a simulated %s: %s\n", n.Name, cluster.Machines[i], n.GPUs.Root())
		logs = append(logs, n.Kubelet.LogFile)
	}
	fmt.Fprint(out, strings.NewReplacer("{dir}", filepath.Dir(bin), "{kubeconfig}", c.Kubeconfig(), "{peers}", peers,
		"{pod}", example, "{node}", c.Nodes[0].Name, "{machine}", c.Nodes[0].GPUs.Root(),
		"{tag}", cluster.UpgradeTag, "{logs}", strings.Join(logs, " ")).Replace(guide))

	go func() {
		_, _ = io.Copy(io.Discard, in)
		stop()
	}()
	<-ctx.Done()
	fmt.Fprintln(out, "Removing the cluster ...")
	return nil
}
