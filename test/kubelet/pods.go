package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/proc"
)

// Pod describes a pod of one container.
type Pod struct {
	// Name is a DNS label.
	Name, Image string
	// Limits are the extended resources that the container requests, by name.
	Limits map[string]int
	// HostNetwork gives the pod the node's network instead of an address of its own.
	HostNetwork bool
	// HostPort is a port of the node that leads to the same port of the pod; 0 for none.
	HostPort int
	// Bandwidth limits the pod's ingress, such as "10M"; empty for no limit.
	Bandwidth string
	// Command replaces the default, which waits for the end of the pod.
	Command []string
	// Directories of the node are mounted read-only, by their paths in the container.
	Directories map[string]string
	// User is the user that the container runs as; 0 is root.
	User int
}

// idle waits for SIGTERM and exits.
const idle = `trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done`

func (p Pod) manifest() ([]byte, error) {
	command := p.Command
	if command == nil {
		command = []string{"sh", "-c", idle}
	}
	// Each manifest is different, since for the kubelet an equal one would be the same pod, which has ended.
	limits, annotations := map[string]string{}, map[string]string{"gpu-test/number": fmt.Sprint(numbers.Add(1))}
	for name, count := range p.Limits {
		limits[name] = fmt.Sprint(count)
	}
	if p.Bandwidth != "" {
		annotations["kubernetes.io/ingress-bandwidth"] = p.Bandwidth
	}
	container := map[string]any{
		"name": "main", "image": p.Image, "imagePullPolicy": "Never", "command": command,
		"resources": map[string]any{"limits": limits},
	}
	volumes, mounts := []any{}, []any{}
	for inside, dir := range p.Directories {
		name := fmt.Sprintf("dir-%d", len(volumes))
		source := map[string]any{"path": dir, "type": "Directory"}
		volumes = append(volumes, map[string]any{"name": name, "hostPath": source})
		mounts = append(mounts, map[string]any{"name": name, "mountPath": inside, "readOnly": true})
	}
	container["volumeMounts"] = mounts
	if p.HostPort != 0 {
		container["ports"] = []any{map[string]any{"containerPort": p.HostPort, "hostPort": p.HostPort}}
	}
	return json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": p.Name, "namespace": "default", "annotations": annotations},
		"spec": map[string]any{
			"hostNetwork": p.HostNetwork, "terminationGracePeriodSeconds": 5, "containers": []any{container},
			"volumes": volumes, "securityContext": map[string]any{"runAsUser": p.User},
		},
	})
}

// PodStatus is the status of a pod from the kubelet.
type PodStatus struct {
	Name                   string
	Phase, Reason, Message string
	IP                     string
	// Container is the container's ID. Running reports whether it runs, Ready whether its readiness probe succeeds.
	// Restarts is how often it was restarted.
	Container      string
	Running, Ready bool
	Restarts       int
	// Waiting is the kubelet's reason why the container waits, Trouble its message about a container that does not run.
	// Both may be empty.
	Waiting, Trouble string
	// Health has the container's devices with their health in the kubelet's words, like "GPU-1=Healthy
	// GPU-2=Unhealthy".
	Health string
	// ExitCode is the exit code of a container that has ended, otherwise -1.
	ExitCode int
}

// Apply writes the manifest of a pod. The kubelet starts the pod later.
func (n *Node) Apply(p Pod) error {
	data, err := p.manifest()
	if err != nil {
		return err
	}
	return n.applyManifest(p.Name, data)
}

// applyManifest writes the manifest of the pod with this name.
func (n *Node) applyManifest(name string, data []byte) error {
	file := filepath.Join(n.Host(kubenode.StaticPods), name+".yaml")
	// The file is renamed, so that the kubelet never reads part of it.
	unseen := n.Host("/var/lib/pod")
	if err := os.WriteFile(unseen, data, 0o644); err != nil {
		return err
	}
	return os.Rename(unseen, file)
}

// Remove removes the manifest of a pod and waits until the pod has ended.
func (n *Node) Remove(ctx context.Context, name string) error {
	if err := os.Remove(filepath.Join(n.Host(kubenode.StaticPods), name+".yaml")); err != nil {
		return err
	}
	return kubenode.Wait(ctx, podTime, "pod "+name+" is gone", func() error {
		pods, err := n.pods(ctx)
		if s, ok := pods[name]; ok {
			err = fmt.Errorf("the kubelet still has it: %+v", s)
		}
		return err
	})
}

// awaitNoPods waits until the kubelet has no pods, and no container of one runs: the kubelet forgets a pod before its
// containers have ended.
func (n *Node) awaitNoPods(ctx context.Context) error {
	return kubenode.Wait(ctx, podTime, "the kubelet has no pods", func() error {
		pods, err := n.pods(ctx)
		if err != nil {
			return err
		}
		if len(pods) > 0 {
			return fmt.Errorf("it has %v", pods)
		}
		res, err := n.Run(ctx, n.Programs.Ctr, "--namespace", "k8s.io", "tasks", "ls", "--quiet")
		if err == nil && (res.Code != 0 || res.Stdout != "") {
			err = fmt.Errorf("containerd has tasks: %v", res)
		}
		return err
	})
}

// podTime is how long a pod may take to start or to end.
const podTime = time.Minute

// Await waits until f accepts the status of a pod, and returns the status.
func (n *Node) Await(ctx context.Context, name, what string, f func(PodStatus) bool) (PodStatus, error) {
	var s PodStatus
	err := kubenode.Wait(ctx, podTime, "pod "+name+" "+what, func() error {
		pods, err := n.pods(ctx)
		if err != nil {
			return err
		}
		if s = pods[name]; !f(s) {
			return fmt.Errorf("it is %+v", s)
		}
		return nil
	})
	return s, n.Kubelet.WithLog(err)
}

// pods returns the status of the kubelet's pods, by the name in the manifest.
func (n *Node) pods(ctx context.Context) (map[string]PodStatus, error) {
	data, err := n.KubeletPods(ctx)
	if err != nil {
		return nil, err
	}
	var list podList
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, fmt.Errorf("read the kubelet's list of pods: %w", err)
	}
	return list.statuses(), nil
}

// podList has the fields of a v1 PodList that the tests read.
type podList struct {
	Items []struct {
		Metadata struct{ Name string }
		Status   struct {
			Phase, Reason, Message, PodIP string
			ContainerStatuses             []struct {
				ContainerID  string
				RestartCount int
				Ready        bool
				State        struct {
					Running    *struct{}
					Terminated *struct{ ExitCode int }
					Waiting    struct{ Reason, Message string }
				}
				LastState struct {
					Terminated struct{ Message string }
				}
				AllocatedResourcesStatus []struct {
					Resources []struct{ ResourceID, Health string }
				}
			}
		}
	}
}

func (l podList) statuses() map[string]PodStatus {
	pods := map[string]PodStatus{}
	for _, p := range l.Items {
		name := strings.TrimSuffix(p.Metadata.Name, "-"+nodeName)
		s := PodStatus{
			Name: name, Phase: p.Status.Phase, Reason: p.Status.Reason, Message: p.Status.Message, IP: p.Status.PodIP,
			ExitCode: -1,
		}
		for _, c := range p.Status.ContainerStatuses {
			s.Container = strings.TrimPrefix(c.ContainerID, "containerd://")
			s.Running, s.Ready, s.Restarts = c.State.Running != nil, c.Ready, c.RestartCount
			s.Waiting = c.State.Waiting.Reason
			s.Trouble = strings.Join([]string{c.State.Waiting.Message, c.LastState.Terminated.Message}, " ")
			if c.State.Terminated != nil {
				s.ExitCode = c.State.Terminated.ExitCode
			}
			var health []string
			for _, resource := range c.AllocatedResourcesStatus {
				for _, d := range resource.Resources {
					health = append(health, d.ResourceID+"="+d.Health)
				}
			}
			slices.Sort(health)
			s.Health = strings.Join(health, " ")
		}
		pods[name] = s
	}
	return pods
}

// numbers makes the names of pods, and of programs in containers, unique.
var numbers atomic.Int64

// Exec runs a program in a running container.
func (n *Node) Exec(ctx context.Context, container string, args ...string) (proc.Result, error) {
	if container == "" {
		return proc.Result{}, errors.New("run a program in a container: there is no container")
	}
	id := fmt.Sprintf("test-%d", numbers.Add(1))
	exec := []string{n.Programs.Ctr, "--namespace", "k8s.io", "tasks", "exec", "--exec-id", id, container}
	return n.Run(ctx, append(exec, args...)...)
}
