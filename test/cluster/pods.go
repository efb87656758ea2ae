package cluster

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
)

// patience is how long a test waits for the cluster, on a busy machine too.
const patience = 2 * time.Minute

// gpuName is the resource of whole GPUs.
const gpuName = "nvidia.com/gpu"

// Pod describes a pod of one container, with GPUImage.
type Pod struct {
	Name string
	// Node is the name of the node that the scheduler must choose; empty for any.
	Node string
	// GPUs is how many GPUs it requests, of Resource or of gpuName. Claims are the templates of its claims.
	GPUs     int
	Resource string
	Claims   []string
	// Restarts has the container started again when it has ended.
	Restarts bool
	// Command replaces the default, which waits for the end of the pod.
	Command []string
	Labels  map[string]string
}

func (p Pod) manifest() map[string]any {
	command := p.Command
	if command == nil {
		command = []string{"sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"}
	}
	selector := map[string]string{}
	if p.Node != "" {
		selector["kubernetes.io/hostname"] = p.Node
	}
	var claims, uses []any
	for _, name := range p.Claims {
		claims = append(claims, map[string]any{"name": name, "resourceClaimTemplateName": name})
		uses = append(uses, map[string]any{"name": name})
	}
	limits := map[string]any{}
	if p.GPUs > 0 {
		limits[cmp.Or(p.Resource, gpuName)] = p.GPUs
	}
	policy := "Never"
	if p.Restarts {
		policy = "Always"
	}
	return map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": p.Name, "labels": p.Labels},
		"spec": map[string]any{
			"resourceClaims": claims,
			"restartPolicy":  policy, "terminationGracePeriodSeconds": 5, "nodeSelector": selector,
			"containers": []any{map[string]any{
				"name": "main", "image": GPUImage, "imagePullPolicy": "Never", "command": command,
				"resources": map[string]any{"limits": limits, "claims": uses},
			}},
		},
	}
}

// PodStatus has what tests read of a pod.
type PodStatus struct {
	Metadata struct{ Name, DeletionTimestamp string }
	Spec     struct{ NodeName string }
	Status   struct {
		Phase, Reason, Message string
		ContainerStatuses      []struct {
			ContainerID  string
			Ready        bool
			RestartCount int
			State        struct {
				Terminated struct{ Reason, Message string }
			}
		}
	}
}

const podsPath = "/api/v1/namespaces/default/pods"

func (c *Cluster) create(ctx context.Context, p Pod) error {
	return c.client.do(ctx, http.MethodPost, podsPath, p.manifest(), nil)
}

// remove removes a pod, and does not wait for its end.
func (c *Cluster) remove(ctx context.Context, name string) error {
	return c.client.do(ctx, http.MethodDelete, podsPath+"/"+name, nil, nil)
}

func (c *Cluster) pod(ctx context.Context, name string) (p PodStatus, err error) {
	return p, c.client.do(ctx, http.MethodGet, podsPath+"/"+name, nil, &p)
}

// awaitPhase waits until a pod is in a phase.
func (c *Cluster) awaitPhase(ctx context.Context, name, phase string) (p PodStatus, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err = kubenode.Wait(ctx, patience, "pod "+name+" is "+phase, func() (err error) {
		if p, err = c.pod(ctx, name); err != nil || p.Status.Phase == phase {
			return err
		}
		err = fmt.Errorf("it is %+v", p)
		if p.Status.Phase == "Failed" { // for good
			cancel()
		}
		return err
	})
	return p, err
}

// pods returns the pods with a label.
func (c *Cluster) pods(ctx context.Context, label string) ([]PodStatus, error) {
	var list struct{ Items []PodStatus }
	return list.Items, c.client.do(ctx, http.MethodGet, podsPath+"?labelSelector="+label, nil, &list)
}

// awaitAllocatable waits until a node's status has this many GPUs for pods.
func (c *Cluster) awaitAllocatable(ctx context.Context, node string, want int) error {
	return kubenode.Wait(ctx, patience, fmt.Sprintf("%s has %d GPUs", node, want), func() error {
		var n struct {
			Status struct{ Allocatable map[string]string }
		}
		err := c.client.do(ctx, http.MethodGet, "/api/v1/nodes/"+node, nil, &n)
		if got := n.Status.Allocatable[gpuName]; err == nil && got != fmt.Sprint(want) && (got != "" || want != 0) {
			err = fmt.Errorf("it has %q", got)
		}
		return err
	})
}
